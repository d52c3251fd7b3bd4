"""Attention in plain torch: runs everywhere, and is what every kernel is tested against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dcprt.attention.partial import Partial, empty_partial
from dcprt.attention.plan import AttentionPlan, RowSlice

QUERY_BLOCK = 256
"""Queries scored at a time, so that the scores of a long prompt stay small."""


class TorchBackend:
    """Scores, softmax and sums in float32, whatever the type of the inputs."""

    def context(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: Sequence[RowSlice], scale: float) -> Partial:
        """See `AttentionBackend.context`."""
        result = empty_partial(q.shape[0], q.shape[1], v_pool.shape[-1])
        for row in rows:
            if row.local_len:
                k, v = self._local(k_pool, row), self._local(v_pool, row)
                _attend(q, k, v, row.start, row.stop, scale, result, causal=False)
        return result

    def new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], plan: AttentionPlan, scale: float
    ) -> Partial:
        """See `AttentionBackend.new_tokens`."""
        result = empty_partial(q.shape[0], q.shape[1], v.shape[-1])
        index = torch.tensor(_uniform_groups(q_to_kv))
        for row in plan.rows:
            keys = k[row.start : row.stop, index].float()
            values = v[row.start : row.stop, index].float()
            _attend(q, keys, values, row.start, row.stop, scale, result, causal=True)
        return result

    def dense(self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], scale: float) -> Partial:
        """See `AttentionBackend.dense`."""
        result = empty_partial(q.shape[0], q.shape[1], v.shape[-1])
        index = torch.tensor(_uniform_groups(q_to_kv))
        if len(k):
            _attend(q, k[:, index].float(), v[:, index].float(), 0, len(q), scale, result, causal=False)
        return result

    @staticmethod
    def _local(pool: Tensor, row: RowSlice) -> Tensor:
        """[local_len, kv_heads, head_dim], float32."""
        return pool[row.pages].flatten(0, 1)[: row.local_len].float()


def _uniform_groups(q_to_kv: Sequence[int]) -> Sequence[int]:
    """The KV heads to attend to, each by equally many consecutive queries: repeated only where they must be."""
    distinct = sorted(set(q_to_kv))
    group = len(q_to_kv) // len(distinct)
    return distinct if list(q_to_kv) == [kv for kv in distinct for _ in range(group)] else q_to_kv


def _blocks(values: Tensor, begin: int, end: int, *, causal: bool) -> Iterator[tuple[int, int]]:
    """The blocks of queries `begin` to `end` that are scored together; see `_attend`."""
    for start in range(begin, end, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, end)
        if not causal or stop - start == 1 or values[:, start - begin + 1 : stop - begin].isfinite().all():
            yield start, stop
        else:
            yield from ((one, one + 1) for one in range(start, stop))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, scale: float, result: Partial, *, causal: bool
) -> None:
    """Attend queries `begin` to `end` to k, v: [keys, kv_heads, dim], in blocks; writes into `result`.

    With `causal`, keys are those of the same tokens, and a block of queries sees none behind its last one. A weight of
    0 does not hide a value that is not finite, so queries of a block where some may not see one are taken one by one.
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    keys = k.permute(1, 2, 0)  # [kv_heads, head_dim, keys]
    values = v.permute(1, 0, 2)  # [kv_heads, keys, head_dim]
    for start, stop in _blocks(values, begin, end, causal=causal):
        count = stop - start
        seen = stop - begin if causal else k.shape[0]
        block = q[start:stop].float().view(count, kv_heads, group, -1).permute(1, 2, 0, 3)
        scores = (block.reshape(kv_heads, group * count, -1) * scale) @ keys[..., :seen]
        if causal and seen > 1:
            ahead = torch.ones(count, seen, dtype=torch.bool).triu_(seen - count + 1)
            scores.view(kv_heads, group, count, seen).masked_fill_(ahead, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        out = (weights @ values[:, :seen]).div_(total)
        result.out[start:stop] = out.view(kv_heads, group, count, -1).permute(2, 0, 1, 3).flatten(1, 2)
        lse = top.add_(total.log()).squeeze(-1)
        result.lse[start:stop] = lse.view(kv_heads, group, count).permute(2, 0, 1).flatten(1, 2)
