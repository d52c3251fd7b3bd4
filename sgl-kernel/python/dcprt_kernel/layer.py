"""A decoder layer of the Llama kind in one call, where one rank has all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["decoder_layer"]

_decoder_layer = _LIBRARY.decoder_layer


def decoder_layer(
    x: Tensor,
    add: Tensor | None,
    norm1: Tensor,
    norm2: Tensor,
    eps: float,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    o: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    width: int,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tokens: Tensor,
    slots: Tensor,
    kv_head_of: Tensor,
    rows: Tensor,
    pages: Tensor,
    scale: float,
    out: Tensor,
    threads: int = 1,
) -> None:
    """`x += add`, then the layer: x gets what attention gives, and `out`, which may be `add`, what the gated MLP gives:
    it is to be added next.

    x, add, out: float32 [tokens, hidden]. Matrices are packed, see `dcprt_kernel.linear`; `width` is that of the MLP.
    Queries and keys are rotated by cos and sin, float32 [tokens, half], halves paired; keys and values of `tokens` go
    to `slots` of the pools, see `dcprt_kernel.merge.store`; attention is that of `dcprt_kernel.attention.paged`.
    Weights and pools are of one type, to which every step between is rounded.

    Raises:
        ValueError: shapes or types do not fit.
    """
    weights = norm1, norm2, eps, qkv, qkv_bias, o, gate_up, gate_up_bias, down, width
    pools = k_pool, v_pool, tokens, slots, kv_head_of, rows, pages
    _decoder_layer(x, add, *weights, cos, sin, *pools, scale, out, threads)
