"""Llama 2, 3 and 3.x, and checkpoints of the same layout (SmolLM2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt.attention.dcp import stack_heads
from dcprt.config import ModelSpec
from dcprt.kv.pool import KVPool, LayerKV
from dcprt.layers.linear import Linear, SummedLinear, VocabEmbedding, VocabLogits
from dcprt.layers.mlp import GatedMLP
from dcprt.layers.norm import RMSNorm
from dcprt.layers.rotary import Rotary
from dcprt.models.base import ModelShard, StepInput
from dcprt.weights.loader import Loader

Angles = tuple[Tensor, Tensor]


class Attention:
    """Own query heads, and the KV heads of the head shard."""

    def __init__(self, spec: ModelSpec, shard: ModelShard, load: Loader, name: str) -> None:
        heads, dim, hidden = shard.heads, spec.head_dim, spec.hidden_size
        wanted = [("q", spec.num_heads, heads.q_heads)] + [(x, spec.num_kv_heads, heads.kv_heads) for x in "kv"]
        rows = [load.head_rows(f"{name}.{x}_proj.weight", (n * dim, hidden), own, dim) for x, n, own in wanted]
        bias = None
        if spec.attention_bias:
            bias = torch.cat([load.head_rows(f"{name}.{x}_proj.bias", (n * dim,), own, dim) for x, n, own in wanted])
        self._qkv = Linear(torch.cat(rows), bias)
        out = load.head_cols(f"{name}.o_proj.weight", (hidden, spec.num_heads * dim), heads.q_heads, dim)
        out_bias = load.full(f"{name}.o_proj.bias", (hidden,)) if spec.attention_bias else None
        self._out = SummedLinear(out, shard.world, out_bias)
        self._attend = shard.attention
        self._q, self._kv = len(heads.q_heads), len(heads.kv_heads)

    def __call__(self, x: Tensor, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor:
        heads = stack_heads(self._qkv(x), self._q + 2 * self._kv)
        rotated = Rotary.rotate(heads[:, : self._q + self._kv], angles)
        q, k, v = rotated[:, : self._q], rotated[:, self._q :], heads[:, self._q + self._kv :]
        return self._out(self._attend(q, k, v, kv, step.attention).flatten(1))


class Layer:
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec, shard: ModelShard, load: Loader, name: str) -> None:
        hidden, width = spec.hidden_size, spec.intermediate_size
        self._norm1 = RMSNorm(load.full(f"{name}.input_layernorm.weight", (hidden,)), spec.rms_eps)
        self._attention = Attention(spec, shard, load, f"{name}.self_attn")
        self._norm2 = RMSNorm(load.full(f"{name}.post_attention_layernorm.weight", (hidden,)), spec.rms_eps)
        part = shard.grid.width(shard.rank, width)
        cut = (part.start, part.stop, part.padded)
        gate_up = torch.cat([load.rows(f"{name}.mlp.{x}_proj.weight", (width, hidden), *cut) for x in ("gate", "up")])
        bias = down_bias = None
        if spec.mlp_bias:
            bias = torch.cat([load.rows(f"{name}.mlp.{x}_proj.bias", (width,), *cut) for x in ("gate", "up")])
            down_bias = load.full(f"{name}.mlp.down_proj.bias", (hidden,))
        down = load.cols(f"{name}.mlp.down_proj.weight", (hidden, width), *cut)
        self._mlp = GatedMLP(Linear(gate_up, bias), SummedLinear(down, shard.world, down_bias))

    def __call__(self, x: Tensor, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor:
        x = x + self._attention(self._norm1(x), angles, step, kv)
        return x + self._mlp(self._norm2(x))


class LlamaForCausalLM:
    """See `dcprt.models.base.Model`."""

    def __init__(self, spec: ModelSpec, shard: ModelShard, load: Loader) -> None:
        self.spec = spec
        part = shard.grid.width(shard.rank, spec.vocab_size)
        vocab = ((spec.vocab_size, spec.hidden_size), part.start, part.stop, part.padded)
        embedding = load.rows("model.embed_tokens.weight", *vocab)
        self._embed = VocabEmbedding(embedding, part, shard.world)
        self._layers = [Layer(spec, shard, load, f"model.layers.{i}") for i in range(spec.num_layers)]
        self._norm = RMSNorm(load.full("model.norm.weight", (spec.hidden_size,)), spec.rms_eps)
        head = embedding if spec.tie_embeddings else load.rows("lm_head.weight", *vocab)
        self._logits = VocabLogits(head, spec.vocab_size, shard.world)
        self._rotary = Rotary(spec.rope, spec.head_dim)

    def forward(self, step: StepInput, kv: KVPool) -> Tensor:
        x = self._embed(step.token_ids)
        angles = self._rotary.angles(step.positions)
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            x = layer(x, angles, step, cache)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(self._norm(hidden))
