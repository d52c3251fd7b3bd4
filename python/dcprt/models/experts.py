"""Routed experts read from a checkpoint, cut by width or by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt.layers.mlp import Expert
from dcprt.layers.moe import Experts, MoE, Router
from dcprt.models.base import ModelShard
from dcprt.models.decoder import MLP, gated_mlp, mlp_part
from dcprt.parallel.grid import split_evenly
from dcprt.spec import ModelSpec, MoESpec
from dcprt.weights.loader import Loader


def feed_forward(spec: ModelSpec, shard: ModelShard, load: Loader, name: str, index: int) -> MLP:
    """What layer `index` has beside its attention: experts where `spec.moe` says so, else a gated MLP."""
    moe = spec.moe
    if moe is None or not moe.routed(index):
        return gated_mlp(spec, shard, load, name, bias=spec.mlp_bias)
    hidden, count = spec.hidden_size, moe.num_experts
    bias = None
    if moe.bias_corrected:
        bias = load.full(f"{name}.gate.e_score_correction_bias", (count,), torch.float32)
    router = Router(load.full(f"{name}.gate.weight", (count, hidden), torch.float32), bias, moe)
    experts = _experts(moe, hidden, shard, load, f"{name}.experts")
    shared = None
    if moe.shared_width:
        shared = mlp_part(spec, shard, load, f"{name}.shared_experts", moe.shared_width)
    return MoE(router, experts, shared, shard.world)


def _experts(moe: MoESpec, hidden: int, shard: ModelShard, load: Loader, name: str) -> Experts:
    """The rank's part of all experts; those of other ranks are only checked for their shapes."""
    width = moe.expert_width
    part = shard.grid.width(shard.rank, width)
    cut, held = (part.start, part.stop, part.padded), range(moe.num_experts)
    if shard.ep:
        cut, held = (0, width, width), split_evenly(moe.num_experts, shard.grid.tp)[shard.rank]
    experts = []
    fused = load.has(f"{name}.gate_up_proj")
    for i in range(moe.num_experts):
        read = _fused if fused else _single
        gate, up, out = read(load, name, i, (moe.num_experts, width, hidden), cut if i in held else (0, 0, 0))
        if i in held:
            experts.append(Expert(load.matrix(torch.cat([gate, up])), load.matrix(out)))
    return Experts(experts, held.start)


def _single(
    load: Loader, name: str, i: int, sizes: tuple[int, int, int], cut: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of expert `i` where each is a tensor of its own, as in published checkpoints."""
    _, width, hidden = sizes
    gate, up = (load.rows(f"{name}.{i}.{x}_proj.weight", (width, hidden), *cut) for x in ("gate", "up"))
    return gate, up, load.cols(f"{name}.{i}.down_proj.weight", (hidden, width), *cut)


def _fused(
    load: Loader, name: str, i: int, sizes: tuple[int, int, int], cut: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where all are stacked: gate and up [experts, 2 * width, hidden], down [experts, hidden, width]."""
    count, width, hidden = sizes
    start, stop, padded = cut
    gate, up = (
        load.rows(f"{name}.gate_up_proj", (count, 2 * width, hidden), start + skip, stop + skip, padded, at=i)
        for skip in (0, width)
    )
    return gate, up, load.cols(f"{name}.down_proj", (count, hidden, width), *cut, at=i)
