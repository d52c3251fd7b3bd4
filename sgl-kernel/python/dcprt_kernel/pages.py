"""Rows of keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["copy", "store"]

_copy = _LIBRARY.kv_copy
_store = _LIBRARY.kv_store


def store(rows: Tensor, tokens: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Rows `tokens` of [tokens, heads, dim] to `slots` of pool [pages, page size, heads, dim]; both int64.

    Raises:
        ValueError: shapes or types do not fit, or a token or slot lies outside.
    """
    _store(rows, tokens, slots, pool)


def copy(pools: Any, source: int, target: int, count: int) -> None:
    """The first `count` slots of page `source` to page `target`, in all pools [pages, page size, ...].

    pools: `dcprt_kernel.held` tensors, contiguous.

    Raises:
        ValueError: a page or slot lies outside, or both pages are the same; nothing has been written then.
    """
    _copy(pools, source, target, count)
