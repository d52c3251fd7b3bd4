"""Decoder layers of the Llama kind in one call, with what ranks that share them exchange meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcprt_kernel import _LIBRARY, ShmGroup

if TYPE_CHECKING:
    from torch import Tensor

    Layers = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], int]
    """x, cos, sin, tokens, slots, rows, pages, out, ends, threads; see `decoder_layers`."""

__all__ = ["DCP", "PARTS", "WEIGHTS", "WORLD", "decoder_layers"]

_decoder_layers = _LIBRARY.decoder_layers

WEIGHTS = (
    *("norm1", "norm2", "q_norm", "k_norm"),
    *("qkv", "qkv_bias", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias"),
)
"""Of each layer, in this order."""

PARTS = (
    *("begun", "projected", "stored", "gathered", "attended", "exchanged", "merged"),
    *("output", "output summed", "gated", "gated summed"),
)
"""Of a layer, in this order; a call notes when they end. The first is before all others."""

WORLD, DCP = 1, 2
"""What a call returns when an operation of that group failed; `ShmGroup.raise_last` says how."""


def decoder_layers(
    weights: Any,
    pools: Any,
    eps: float,
    width: int,
    kv_head_of: Tensor,
    projected: int,
    scale: float,
    world: ShmGroup | None = None,
    dcp: ShmGroup | None = None,
    timeout_s: float = 0,
) -> Layers:
    """A function that computes layer after layer: x gets what the one before left to be added and what attention gives,
    and `out` what the gated MLP gives, which is to be added next. It returns 0, `WORLD` or `DCP`.

    weights: `dcprt_kernel.held` tensors of all layers, `WEIGHTS` each; a bias or a norm of heads without elements is
    none, matrices are packed or coded, see `dcprt_kernel.linear`, `width` is that of the MLP. pools:
    `dcprt_kernel.held` keys and values, two for each layer, which all have the same shape. Weights and pools are of one
    type, to which every step between is rounded, and live as long as the function.

    Of a call: x, out: float32 [tokens, hidden]. Queries and keys are normed head by head, by `q_norm` and `k_norm`
    [dim], and rotated by cos and sin, float32 [tokens, half], halves paired; keys and values of `tokens` go to `slots`
    of the pools, see `dcprt_kernel.pages.store`. ends: int64 [layers, parts] or without elements; gets when each of
    `PARTS` ended, in nanoseconds of the monotonic clock, but of those that a layer does not have.

    Alone, attention is that of `dcprt_kernel.attention.paged`. The inputs of `o` and `down` may be cut among the ranks
    of `world`: outputs are summed then, before their biases are added. With `dcp`, tokens are spread over its ranks:
    `kv_head_of` counts the query heads of all of them, those of rank 0 first, attention is that of
    `dcprt_kernel.attention.context`, and results are merged. `projected` query heads come from `qkv`: those of this
    rank, which are gathered, or all. Every rank makes the same calls, and has `timeout_s` to join an operation. No
    group is closed before the last call.

    Raises:
        ValueError: shapes or types do not fit; of what changes from call to call, by the call.
    """
    groups = [0 if group is None else group.handle for group in (world, dcp)]
    found: Layers = _decoder_layers(weights, pools, eps, width, kv_head_of, projected, scale, *groups, timeout_s)
    return found
