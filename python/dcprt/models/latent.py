"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent a token, for all heads.

Two forms of the same product. New tokens among themselves: keys and values are projected up from the latents, heads
are small. Over the cache: the up-projection of keys is absorbed into the queries, so that they meet the latents
themselves, as one KV head; outputs are latents too, and are projected up afterwards. The native products hold the
up-projections once for each form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt.attention.dcp import Queries, Up, ValueUp, stack_heads
from dcprt.attention.partial import Partial, merge
from dcprt.attention.plan import AttentionPlan
from dcprt.kv.pool import LayerKV
from dcprt.layers.linear import SummedLinear
from dcprt.layers.norm import Normed, RMSNorm
from dcprt.layers.rotary import Rotary
from dcprt.models.base import ModelShard, StepInput
from dcprt.models.decoder import Angles
from dcprt.ops import HeadMatrix
from dcprt.spec import MLASpec, ModelSpec
from dcprt.weights.loader import Loader

LATENT_EPS = 1e-6
"""Of the norms between the low-rank projections, whatever the model's own is."""


class LatentAttention:
    """Own query heads; the latents of all new tokens, which every rank computes."""

    def __init__(self, spec: ModelSpec, shard: ModelShard, load: Loader, name: str) -> None:
        assert spec.mla is not None
        mla, self._attend, self._replicated = spec.mla, shard.attention, shard.replicate_q
        self._latent_dim = mla.kv_lora_rank
        heads = shard.heads.shard_q_heads if shard.replicate_q else shard.heads.q_heads
        self._query = LatentQuery(spec, mla, load, name, heads)
        hidden, latent = spec.hidden_size, mla.kv_lora_rank + mla.rope_dim
        down = load.full(f"{name}.kv_a_proj_with_mqa.weight", (latent, hidden))
        bias = load.full(f"{name}.kv_a_proj_with_mqa.bias", (latent,)) if spec.attention_bias else None
        self._down = load.matrix(
            _halved(spec, down, mla.rope_dim), None if bias is None else _halved(spec, bias, mla.rope_dim)
        )
        self._norm = RMSNorm(load.full(f"{name}.kv_a_layernorm.weight", (mla.kv_lora_rank,)), LATENT_EPS)
        dim = mla.nope_dim + mla.v_dim
        ups = load.head_rows(f"{name}.kv_b_proj.weight", (spec.num_heads * dim, mla.kv_lora_rank), heads, dim)
        ups = ups.view(len(heads), dim, mla.kv_lora_rank)
        self._up_dims = [mla.nope_dim, mla.v_dim]
        self._absorb = load.head_matrix(ups[:, : mla.nope_dim].transpose(1, 2))
        self._raise = _value_up(load.head_matrix(ups[:, mla.nope_dim :]), shard)
        own = ups[self._attend.own_places] if self._replicated else ups
        self._ups = load.matrix(own.flatten(0, 1))
        out = (hidden, spec.num_heads * mla.v_dim)
        out_bias = load.full(f"{name}.o_proj.bias", (hidden,)) if spec.attention_bias else None
        weight = load.head_cols(f"{name}.o_proj.weight", out, shard.heads.q_heads, mla.v_dim)
        self._out = SummedLinear(load.matrix(weight), shard.world, out_bias)

    def __call__(self, x: Normed, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor:
        hidden = x.value()
        nope, rope = self._query(hidden, angles)
        down = self._down(hidden)
        latent = self._norm(down[:, : self._latent_dim].float())
        turned = Rotary.rotate(down[:, None, self._latent_dim :], angles)
        plan = step.attention
        kv.store(torch.cat([latent[:, None], turned], dim=-1), None, plan.store_tokens, plan.store_slots)
        if plan.own_in_context:
            part = self._context(nope, rope, plan, kv)
        else:
            part = self._new_tokens(nope, rope, latent, turned, step)
            if plan.any_context:
                part = merge(self._context(nope, rope, plan, kv), part)
        return self._out(part.out.flatten(1))

    def _context(self, nope: Tensor, rope: Tensor, plan: AttentionPlan, kv: LayerKV) -> Partial:
        """Absorbed: queries that meet the latents themselves."""
        absorbed = rope.new_empty(*rope.shape[:2], self._latent_dim + rope.shape[2])
        self._absorb(nope, absorbed[..., : self._latent_dim])
        absorbed[..., self._latent_dim :] = rope
        queries = Queries(self._own(absorbed), absorbed if self._replicated else None)
        return self._attend.context(queries, kv, plan, self._raise)

    def _new_tokens(self, nope: Tensor, rope: Tensor, latent: Tensor, turned: Tensor, step: StepInput) -> Partial:
        """Unabsorbed: keys [tokens, own heads, nope_dim + rope_dim], values [tokens, own heads, v_dim]."""
        ups = stack_heads(self._ups(latent), len(self._attend.heads.q_heads))
        keys, values = torch.split(ups, self._up_dims, dim=-1)
        k = torch.cat([keys, turned.expand(-1, keys.shape[1], -1)], dim=-1)
        q = self._own(torch.cat([nope, rope], dim=-1))
        return self._attend.new_tokens(q, k, values, tuple(range(keys.shape[1])), step.attention)

    def _own(self, q: Tensor) -> Tensor:
        return q[:, self._attend.own_places] if self._replicated else q


def _value_up(weights: HeadMatrix, shard: ModelShard) -> ValueUp:
    """Outputs to values: of the own heads, or before they are combined where `weights` are those of the whole shard."""

    def up(heads: slice) -> Up:
        def raised(out: Tensor) -> Tensor:
            values = out.new_empty(*out.shape[:2], weights.shape[1])
            weights(out, values, heads)
            return values

        return raised

    whole = slice(None)
    return ValueUp(up(shard.attention.own_places), up(whole)) if shard.replicate_q else ValueUp(up(whole))


class LatentQuery:
    """Queries of `heads`, projected at once or through a low rank."""

    def __init__(self, spec: ModelSpec, mla: MLASpec, load: Loader, name: str, heads: tuple[int, ...]) -> None:
        dim, width = mla.nope_dim + mla.rope_dim, mla.q_lora_rank or spec.hidden_size
        self._nope, self._count, self._first = mla.nope_dim, len(heads), None
        if mla.q_lora_rank:
            bias = load.full(f"{name}.q_a_proj.bias", (width,)) if spec.attention_bias else None
            self._first = load.matrix(load.full(f"{name}.q_a_proj.weight", (width, spec.hidden_size)), bias)
            self._norm = RMSNorm(load.full(f"{name}.q_a_layernorm.weight", (width,)), LATENT_EPS)
        last = f"{name}.q_b_proj.weight" if mla.q_lora_rank else f"{name}.q_proj.weight"
        weight = load.head_rows(last, (spec.num_heads * dim, width), heads, dim)
        by_head = [_halved(spec, part, mla.rope_dim) for part in weight.view(len(heads), dim, width)]
        self._last = load.matrix(torch.cat(by_head))

    def __call__(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[tokens, heads, nope_dim] and, rotated, [tokens, heads, rope_dim]."""
        if self._first is not None:
            x = self._norm(self._first(x).float())
        q = stack_heads(self._last(x), self._count)
        return q[..., : self._nope], Rotary.rotate(q[..., self._nope :], angles)


def _halved(spec: ModelSpec, rows: Tensor, rope_dim: int) -> Tensor:
    """The last `rope_dim` rows from interleaved pairs, where the checkpoint has them so, to two halves.

    Scores do not change, since queries and keys are reordered alike.
    """
    if not spec.rope_interleaved:
        return rows
    start = len(rows) - rope_dim
    return torch.cat([rows[:start], rows[start::2], rows[start + 1 :: 2]])
