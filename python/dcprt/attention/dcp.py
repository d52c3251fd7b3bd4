"""Exact attention over a KV cache that is spread along the sequence.

    1. the caller projected: own queries, and K/V of the new tokens for the head shard
    2. store the new K/V that this rank owns
    3. context pass over what was cached before the step, on all ranks of the group
    4. new-token pass: local and causal; merge. Where every row has one new token, the context pass sees it too instead

The context pass brings queries and keys together in one of two ways, whichever moves fewer bytes: gather the queries
of the head shard, attend to the local slots, combine over the group; or gather K and V, and attend with the own
queries. With few new tokens (decode) it is the first. One formula serves prefill, chunked prefill and decode; at dcp=1
gathering and combining fall away, and a backend may do both passes as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt.attention.backend import AttentionBackend, FusedBackend
from dcprt.attention.combine import Combine, a2a, gather_heads, way_for
from dcprt.attention.partial import Partial, empty_partial, merge
from dcprt.attention.plan import AttentionPlan, ContextCosts, ContextSchedule, RowSlice
from dcprt.comm.protocol import Collective
from dcprt.kv.pool import LayerKV
from dcprt.parallel.grid import RankHeads


@dataclass(frozen=True)
class Queries:
    """Queries of a step's new tokens: the rank's own heads [tokens, own heads, dim], or, with `--dcp-replicate-q`,
    all of the head shard [tokens, shard heads, dim].
    """

    own: Tensor
    shard: Tensor | None = None


Up = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ValueUp:
    """What is done to outputs, where the cache holds latents: [tokens, heads, latent] to [tokens, heads, v_dim].

    `own` is for the rank's own heads, `shard` for all of the head shard where those weights are replicated: then the
    smaller results are combined.
    """

    own: Up
    shard: Up | None = None


class DcpAttention:
    """Attention of one rank's heads; the same object serves all layers."""

    def __init__(
        self,
        heads: RankHeads,
        scale: float,
        backend: AttentionBackend,
        group: Collective,
        combine: Combine,
        costs: ContextCosts,
    ) -> None:
        self.heads = heads
        self.backend = backend
        self.scale = scale
        self.fused = backend if group.size == 1 and isinstance(backend, FusedBackend) else None
        self.group = group
        self._combine = combine
        self._costs = costs
        self._scheduled: tuple[AttentionPlan, ContextSchedule] | None = None

    @property
    def own_places(self) -> slice:
        """Where the own heads are among those of the head shard."""
        own = len(self.heads.q_heads)
        return slice(self.group.rank * own, (self.group.rank + 1) * own)

    def is_one_pass(self, plan: AttentionPlan) -> bool:
        """Whether the step needs but one pass over what is stored: by a backend that does both at once, or by gathering
        the queries of all tokens and exchanging results in one `a2a`. Every rank answers alike.
        """
        if self.fused is not None:
            return True
        tokens = len(plan.rows)
        if not plan.own_in_context or way_for(self._combine, tokens) is not a2a:
            return False
        return [(block.start, block.stop) for block in self._schedule(plan).blocks] == [(0, tokens)]

    def __call__(self, q: Queries, k: Tensor, v: Tensor, cache: LayerKV, plan: AttentionPlan) -> Tensor:
        """k, v: [tokens, kv_heads, dim]; stores them; returns float32 [tokens, own heads, dim]."""
        cache.store(k, v, plan.store_tokens, plan.store_slots)
        if self.fused is not None:
            return self.fused.paged(q.own, cache.k, cache.v, self.heads.q_to_kv, plan.rows, self.scale)
        if plan.own_in_context:
            return self.context(q, cache, plan).out
        part = self.new_tokens(q.own, k, v, self.heads.q_to_kv, plan)
        if plan.any_context:
            part = merge(self.context(q, cache, plan), part)
        return part.out

    def new_tokens(self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: tuple[int, ...], plan: AttentionPlan) -> Partial:
        """Causal attention of the new tokens among themselves; see `AttentionBackend.new_tokens`."""
        return self.backend.new_tokens(q, k, v, q_to_kv, plan, self.scale)

    def context(self, q: Queries, cache: LayerKV, plan: AttentionPlan, up: ValueUp | None = None) -> Partial:
        """Attention of own heads to everything cached before the step, on all ranks of the group.

        Returns out [tokens, own heads, value dim], after `up` if given; lse -inf for rows without context.
        """
        if self.group.size == 1:
            part = self.backend.context(q.own, cache.k, cache.v, plan.rows, self.scale)
            return _raised(part, up.own if up else None)
        schedule = self._schedule(plan)
        found: list[tuple[int, int, Partial]] = []
        for block in schedule.blocks:
            part = self._gather_queries(q, cache, block.start, block.stop, block.rows, up)
            found.append((block.start, block.stop, part))
        for row in schedule.gather_kv:
            part = self._gather_kv(q.own[row.start : row.stop], cache, row)
            found.append((row.start, row.stop, _raised(part, up.own if up else None)))
        if len(found) == 1 and found[0][2].out.shape[0] == q.own.shape[0]:
            return found[0][2]
        result = empty_partial(q.own.shape[0], q.own.shape[1], found[0][2].out.shape[-1])
        for start, stop, part in found:
            result.out[start:stop], result.lse[start:stop] = part
        return result

    def _schedule(self, plan: AttentionPlan) -> ContextSchedule:
        """Made once a step."""
        if self._scheduled is None or self._scheduled[0] is not plan:
            self._scheduled = plan, self._costs.schedule(plan)
        return self._scheduled[1]

    def _gather_queries(
        self, q: Queries, cache: LayerKV, start: int, stop: int, rows: tuple[RowSlice, ...], up: ValueUp | None
    ) -> Partial:
        """Tokens `start` to `stop`: all heads of the shard over the local slots, then combined."""
        queries = gather_heads(q.own[start:stop], self.group) if q.shard is None else q.shard[start:stop]
        local = self.backend.context(queries, cache.k, cache.v, rows, self.scale)
        if up is None:
            return self._combine(local, self.group)
        if up.shard is not None:
            return self._combine(_raised(local, up.shard), self.group)
        return _raised(self._combine(local, self.group), up.own)

    def _gather_kv(self, q: Tensor, cache: LayerKV, row: RowSlice) -> Partial:
        """Own heads over all context of one row, a chunk of every rank's slots at a time.

        Chunks are disjoint and cover every rank's slots, so each context token is attended exactly once.
        """
        size = max(self._costs.chunk_tokens // self.group.size, 1)
        result = None
        for start in range(0, max(row.local_lens), size):
            k, v = self._gathered_slots(cache, row, start, size)
            part = self.backend.dense(q, k, v, self.heads.q_to_kv, self.scale)
            result = part if result is None else merge(result, part)
        assert result is not None
        return result

    def _gathered_slots(self, cache: LayerKV, row: RowSlice, start: int, size: int) -> tuple[Tensor, Tensor]:
        """K and V in slots `start` to `start + size` of all ranks: [keys, kv_heads, dim] each, in rank order."""
        counts = [min(max(length - start, 0), size) for length in row.local_lens]
        own = cache.context(row.pages, start, start + counts[self.group.rank])
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = self.group.all_gather(padded)
        keys = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return cache.split(keys)


def _raised(part: Partial, up: Up | None) -> Partial:
    return part if up is None else Partial(up(part.out), part.lse)


def stack_heads(x: Tensor, heads: int) -> Tensor:
    """[tokens, heads * head_dim] to [tokens, heads, head_dim]."""
    return torch.unflatten(x, 1, (heads, -1))
