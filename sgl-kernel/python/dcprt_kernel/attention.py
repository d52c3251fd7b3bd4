"""Attention over paged, new or plain keys, each giving results that can still be merged.

Everywhere: q [tokens, heads, dim], float32 or bfloat16; keys and values likewise, their last dimension dense; the
dimensions of heads are multiples of 8; `kv_head_of` int64 [heads], the KV head of every query head. Results are written
to `out` float32 [tokens, heads, value dim] and `lse` float32 [tokens, heads] (natural log), dense, whatever they hold
before: 0 and -inf where there is no key. Wrong shapes and types raise ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

_context = _LIBRARY.attention_context
_paged = _LIBRARY.attention_paged
_new_tokens = _LIBRARY.attention_new_tokens
_dense = _LIBRARY.attention_dense
_exp = _LIBRARY.attention_exp

MULTIPLE = 8
"""What dimensions of heads are multiples of."""


def context(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    kv_head_of: Tensor,
    rows: Tensor,
    pages: Tensor,
    scale: float,
    threads: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Without a mask, over the first slots of each row's pages.

    k_pool, v_pool: [pages, page_size, kv_heads, dim], with any steps between the outer dimensions. rows: int64
    [rows, 4], each its first token, the one behind its last, its number of keys, and where its pages begin in `pages`,
    int64.
    """
    _context(q, k_pool, v_pool, kv_head_of, rows, pages, scale, threads, out, lse)


def paged(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    kv_head_of: Tensor,
    rows: Tensor,
    pages: Tensor,
    scale: float,
    threads: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal, over each row's context and its own tokens, all of them in its pages; as `context`, but the third column
    of rows is the length of the context.
    """
    _paged(q, k_pool, v_pool, kv_head_of, rows, pages, scale, threads, out, lse)


def new_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_head_of: Tensor,
    rows: Tensor,
    scale: float,
    threads: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal, of each row's tokens among themselves; k, v: [tokens, kv_heads, dim]; rows as in `context`."""
    _new_tokens(q, k, v, kv_head_of, rows, scale, threads, out, lse)


def dense(
    q: Tensor, k: Tensor, v: Tensor, kv_head_of: Tensor, scale: float, threads: int, out: Tensor, lse: Tensor
) -> None:
    """Without a mask, all queries to all keys; k, v: [keys, kv_heads, dim]."""
    _dense(q, k, v, kv_head_of, scale, threads, out, lse)


def exp(x: Tensor, out: Tensor) -> None:
    """The exponential that weights are made with, for x <= 88: within 2 units in the last place; 0 below -87.33."""
    _exp(x, out)
