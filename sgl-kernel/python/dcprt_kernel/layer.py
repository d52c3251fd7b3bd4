"""Decoder layers of the Llama kind in one call, where one rank has all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WEIGHTS", "decoder_layers"]

_decoder_layers = _LIBRARY.decoder_layers

WEIGHTS = ("norm1", "norm2", "qkv", "qkv_bias", "o", "gate_up", "gate_up_bias", "down")
"""Of each layer, in this order."""


def decoder_layers(
    x: Tensor,
    weights: Any,
    eps: float,
    width: int,
    cos: Tensor,
    sin: Tensor,
    pools: Any,
    tokens: Tensor,
    slots: Tensor,
    kv_head_of: Tensor,
    rows: Tensor,
    pages: Tensor,
    scale: float,
    out: Tensor,
    threads: int = 1,
) -> None:
    """Layer after layer: x gets what the one before left to be added and what attention gives, and `out` what the gated
    MLP gives, which is to be added next.

    x, out: float32 [tokens, hidden]. weights: `dcprt_kernel.held` tensors of all layers, `WEIGHTS` each; a bias without
    elements is none, matrices are packed or coded, see `dcprt_kernel.linear`, `width` is that of the MLP. pools:
    `dcprt_kernel.held` keys and values, two for each layer, which all have the same shape.
    Queries and keys are rotated by cos and sin, float32 [tokens, half], halves paired; keys and values of `tokens` go
    to `slots` of the pools, see `dcprt_kernel.pages.store`; attention is that of `dcprt_kernel.attention.paged`.
    Weights and pools are of one type, to which every step between is rounded.

    Raises:
        ValueError: shapes or types do not fit.
    """
    where = tokens, slots, kv_head_of, rows, pages
    _decoder_layers(x, weights, eps, width, cos, sin, pools, *where, scale, out, threads)
