"""Exact attention over a KV cache that is spread along the sequence.

    1. the caller projected: own queries, and K/V of the new tokens for the head shard
    2. context pass: gather the queries of the head shard, attend to the local slots, combine over the group
    3. new-token pass: local and causal
    4. merge; store the new K/V that this rank owns

One formula for prefill, chunked prefill and decode. At dcp=1 the gather and the combination fall away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt.attention.backend import AttentionBackend
from dcprt.attention.partial import Partial, combined_lse, merge, scaled, shares
from dcprt.attention.plan import AttentionPlan
from dcprt.comm.protocol import Collective
from dcprt.kv.pool import LayerKV
from dcprt.parallel.grid import RankHeads


class DcpAttention:
    """Attention of one rank's heads; the same object serves all layers."""

    def __init__(self, heads: RankHeads, head_dim: int, backend: AttentionBackend, group: Collective) -> None:
        self._heads = heads
        self._scale = head_dim**-0.5
        self._backend = backend
        self._group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerKV, plan: AttentionPlan) -> Tensor:
        """q: [tokens, own heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; returns the shape and type of q."""
        part = self._backend.new_tokens(q, k, v, self._heads.q_to_kv, plan, self._scale)
        if plan.any_context:
            part = merge(self._context(q, cache, plan), part)
        cache.store(k, v, plan.store_tokens, plan.store_slots)
        return part.out.to(q.dtype)

    def _context(self, q: Tensor, cache: LayerKV, plan: AttentionPlan) -> Partial:
        """Attention of own heads to everything cached before this step, on all ranks of the group."""
        group = self._group
        if group.size == 1:
            return self._backend.context(q, cache.k, cache.v, plan, self._scale)
        gathered = group.all_gather(q.contiguous()).transpose(0, 1).flatten(1, 2)
        local = self._backend.context(gathered, cache.k, cache.v, plan, self._scale)
        return combine_ag_rs(local, group)


def combine_ag_rs(local: Partial, group: Collective) -> Partial:
    """All-gather of the lse, then a reduce-scatter over heads of the scaled outputs.

    local: [tokens, all heads of the group, head_dim], the same heads on every rank over different keys; returns the
    own heads over all keys.
    """
    tokens, heads, head_dim = local.out.shape
    own = heads // group.size
    lses = group.all_gather(local.lse)
    part = scaled(local.out, shares(lses)[group.rank])
    out = group.reduce_scatter(part.view(tokens, group.size, own, head_dim).transpose(0, 1).contiguous())
    return Partial(out, combined_lse(lses).view(tokens, group.size, own)[:, group.rank].contiguous())


def stack_heads(x: Tensor, heads: int) -> Tensor:
    """[tokens, heads * head_dim] to [tokens, heads, head_dim]."""
    return torch.unflatten(x, 1, (heads, -1))
