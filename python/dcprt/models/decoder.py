"""What all decoders share: embedding, layers beside a residual, last norm, logits. A family says what a layer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dcprt.attention.dcp import Queries, stack_heads
from dcprt.comm.protocol import Collective
from dcprt.kv.pool import KVPool, LayerKV
from dcprt.layers.linear import SummedLinear, VocabEmbedding, VocabLogits
from dcprt.layers.mlp import Expert, GatedMLP
from dcprt.layers.norm import Normed, RMSNorm
from dcprt.layers.rotary import Rotary
from dcprt.models.base import ModelShard, StepInput
from dcprt.ops import NATIVE
from dcprt.spec import ModelSpec
from dcprt.weights.loader import Loader

if TYPE_CHECKING:
    from dcprt.models.whole import NativeLayers

Angles = tuple[Tensor, Tensor]


MLP = Callable[[Normed], Tensor]
"""What follows the second norm of a layer; returns float32 [tokens, hidden], summed over the ranks."""


class Attention(Protocol):
    """What follows the first norm of a layer; returns float32 [tokens, hidden], summed over the ranks."""

    def __call__(self, x: Normed, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    """Attention and MLP, each behind a norm and beside a residual.

    A call returns what is to be added to the residual `x`, float32 [tokens, hidden], next; `add` is what the layer
    before left to be added, and x, which is overwritten, becomes the sum up to there.
    """

    norm1: RMSNorm
    attention: Attention
    norm2: RMSNorm
    mlp: MLP

    def __call__(self, x: Tensor, add: Tensor | None, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor:
        attended = self.attention(self.norm1.of(x, add), angles, step, kv)
        return self.mlp(self.norm2.of(x, attended))


class Decoder:
    """See `dcprt.models.base.Model`. `make_layer(i, name)` gives layer `i`, whose tensors begin with `name`."""

    def __init__(
        self, spec: ModelSpec, shard: ModelShard, load: Loader, make_layer: Callable[[int, str], Layer]
    ) -> None:
        self.spec = spec
        part = shard.grid.width(shard.rank, spec.vocab_size)
        vocab = ((spec.vocab_size, spec.hidden_size), part.start, part.stop, part.padded)
        embedding = load.matrix(load.rows("model.embed_tokens.weight", *vocab))
        self._embed = VocabEmbedding(embedding, part, shard.world)
        self._layers = [make_layer(i, f"model.layers.{i}") for i in range(spec.num_layers)]
        self._whole = _whole(self._layers, shard.world)
        self._norm = RMSNorm(load.full("model.norm.weight", (spec.hidden_size,)), spec.rms_eps)
        head = embedding if spec.tie_embeddings else load.matrix(load.rows("lm_head.weight", *vocab))
        self._logits = VocabLogits(head, spec.vocab_size, shard.world)
        self._rotary = Rotary(spec.rope, spec.rotary_dim)

    def forward(self, step: StepInput, kv: KVPool) -> Tensor:
        x = self._embed(step.token_ids)
        angles = self._rotary.angles(step.positions)
        add = None
        if self._whole is not None and self._whole.take(step):
            add = self._whole(x, angles, step, kv)
        else:
            for layer, cache in zip(self._layers, kv.layers, strict=True):
                add = layer(x, add, angles, step, cache)
        return x if add is None else x.add_(add)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(self._norm(hidden))


def _whole(layers: Sequence[Layer], world: Collective) -> NativeLayers | None:
    """The layers as one native call, where the kernels are installed and know all of them."""
    if not NATIVE:
        return None
    from dcprt.models.whole import NativeLayers

    return NativeLayers.of(layers, world)


class GQAttention:
    """Grouped-query attention: own query heads, and the KV heads of the head shard.

    `qkv_bias` and `out_bias` say which products have one, `qk_norm` whether each query and key head is normalized
    before the rotation. Only the first `spec.rotary_dim` dimensions of a head are rotated.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: ModelShard,
        load: Loader,
        name: str,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        heads, dim, hidden = shard.heads, spec.head_dim, spec.hidden_size
        self.head_dim = dim
        queries = heads.shard_q_heads if shard.replicate_q else heads.q_heads
        wanted = [("q", spec.num_heads, queries)] + [(x, spec.num_kv_heads, heads.kv_heads) for x in "kv"]
        rows = [load.head_rows(f"{name}.{x}_proj.weight", (n * dim, hidden), own, dim) for x, n, own in wanted]
        bias = None
        if qkv_bias:
            bias = torch.cat([load.head_rows(f"{name}.{x}_proj.bias", (n * dim,), own, dim) for x, n, own in wanted])
        self.qkv = load.matrix(torch.cat(rows), bias)
        out = load.head_cols(f"{name}.o_proj.weight", (hidden, spec.num_heads * dim), heads.q_heads, dim)
        self.out = SummedLinear(
            load.matrix(out), shard.world, load.full(f"{name}.o_proj.bias", (hidden,)) if out_bias else None
        )
        self.norms = [RMSNorm(load.full(f"{name}.{x}_norm.weight", (dim,)), spec.rms_eps) for x in "qk" if qk_norm]
        self.attend = shard.attention
        self.projected, self._kv = len(queries), len(heads.kv_heads)
        self._replicated = shard.replicate_q

    def __call__(self, x: Normed, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor:
        heads = stack_heads(x.times(self.qkv), self.projected + 2 * self._kv)
        q, k, v = torch.split(heads, [self.projected, self._kv, self._kv], dim=1)
        if self.norms:
            q, k = Rotary.rotate(self.norms[0](q), angles), Rotary.rotate(self.norms[1](k), angles)
        else:
            Rotary.rotate(heads[:, : self.projected + self._kv], angles)
        queries = Queries(q[:, self.attend.own_places], q) if self._replicated else Queries(q)
        return self.out(self.attend(queries, k, v, kv, step.attention).flatten(1))


def gated_mlp(
    spec: ModelSpec,
    shard: ModelShard,
    load: Loader,
    name: str,
    *,
    bias: bool = False,
) -> GatedMLP:
    """The model's gated MLP, cut by width over all ranks."""
    part = mlp_part(spec, shard, load, name, spec.intermediate_size, bias=bias)
    down_bias = load.full(f"{name}.down_proj.bias", (spec.hidden_size,)) if bias else None
    return GatedMLP(part.gate_up, SummedLinear(part.down, shard.world, down_bias))


def mlp_part(spec: ModelSpec, shard: ModelShard, load: Loader, name: str, width: int, *, bias: bool = False) -> Expert:
    """This rank's part of a gated MLP of `width`; a bias behind it is left to who sums the parts."""
    cut_width, hidden = shard.grid.width(shard.rank, width), spec.hidden_size
    cut = (cut_width.start, cut_width.stop, cut_width.padded)
    gate_up = torch.cat([load.rows(f"{name}.{x}_proj.weight", (width, hidden), *cut) for x in ("gate", "up")])
    in_bias = None
    if bias:
        in_bias = torch.cat([load.rows(f"{name}.{x}_proj.bias", (width,), *cut) for x in ("gate", "up")])
    down = load.cols(f"{name}.down_proj.weight", (hidden, width), *cut)
    return Expert(load.matrix(gate_up, in_bias), load.matrix(down))


def layer(spec: ModelSpec, load: Loader, name: str, attention: Attention, mlp: MLP) -> Layer:
    """A layer with its two norms, under the names that all families use."""
    norms = [
        load.full(f"{name}.{x}.weight", (spec.hidden_size,)) for x in ("input_layernorm", "post_attention_layernorm")
    ]
    return Layer(RMSNorm(norms[0], spec.rms_eps), attention, RMSNorm(norms[1], spec.rms_eps), mlp)
