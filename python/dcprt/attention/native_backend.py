"""Attention by the native kernels of `dcprt_kernel`: one call for all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import dcprt_kernel.attention as kernel
from dcprt.attention.partial import Partial, merge
from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.torch_backend import TorchBackend

KEPT_TABLES = 16
"""Tables of rows that are kept: one step has a few, the same for all layers."""


class RowTable(NamedTuple):
    """rows: int64 [rows, 4], as the kernels take them; pages: int64, those of all rows one after another."""

    rows: Tensor
    pages: Tensor


class NativeBackend:
    """Sums in float32, whatever the type of the inputs; on as many threads as torch uses."""

    def __init__(self) -> None:
        self._torch = TorchBackend()
        self._tables: dict[int, tuple[tuple[RowSlice, ...], RowTable]] = {}
        self._maps: dict[tuple[int, ...], Tensor] = {}

    def context(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: Sequence[RowSlice], scale: float) -> Partial:
        """See `AttentionBackend.context`."""
        if not _fits(q, k_pool, v_pool):
            return self._torch.context(q, k_pool, v_pool, rows, scale)
        table, group = self.table(rows), q.shape[1] // k_pool.shape[2]
        heads = self.head_map(tuple(h // group for h in range(q.shape[1])))
        part = _unfilled(q, v_pool)
        kernel.context(_dense(q), _dense(k_pool), _dense(v_pool), heads, *table, scale, torch.get_num_threads(), *part)
        return part

    def paged(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, q_to_kv: Sequence[int], rows: Sequence[RowSlice], scale: float
    ) -> Tensor:
        """See `FusedBackend.paged`."""
        if not _fits(q, k_pool, v_pool):
            return self._paged_by_torch(q, k_pool, v_pool, q_to_kv, rows, scale)
        table, heads, part = self.table(rows), self.head_map(tuple(q_to_kv)), _unfilled(q, v_pool)
        kernel.paged(_dense(q), k_pool, v_pool, heads, *table, scale, torch.get_num_threads(), *part)
        return part.out

    def _paged_by_torch(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, q_to_kv: Sequence[int], rows: Sequence[RowSlice], scale: float
    ) -> Tensor:
        """Each row's keys and values side by side, then as if none were cached and its tokens the last of all."""
        out = torch.empty(*q.shape[:2], v_pool.shape[-1])
        for row in rows:
            length, queries = row.context_len + row.new_len, q[row.start : row.stop]
            k, v = (pool[row.pages].flatten(0, 1)[:length] for pool in (k_pool, v_pool))
            before = self._torch.dense(queries, k[: row.context_len], v[: row.context_len], q_to_kv, scale)
            own = RowSlice(0, row.new_len, 0, 0, row.pages)
            plan = AttentionPlan((own,), row.pages, row.pages)
            among = self._torch.new_tokens(queries, k[row.context_len :], v[row.context_len :], q_to_kv, plan, scale)
            out[row.start : row.stop] = merge(before, among).out
        return out

    def new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], plan: AttentionPlan, scale: float
    ) -> Partial:
        """See `AttentionBackend.new_tokens`."""
        if not _fits(q, k, v):
            return self._torch.new_tokens(q, k, v, q_to_kv, plan, scale)
        table, heads, part = self.table(plan.rows), self.head_map(tuple(q_to_kv)), _unfilled(q, v)
        kernel.new_tokens(_dense(q), _dense(k), _dense(v), heads, table.rows, scale, torch.get_num_threads(), *part)
        return part

    def dense(self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], scale: float) -> Partial:
        """See `AttentionBackend.dense`."""
        if not _fits(q, k, v):
            return self._torch.dense(q, k, v, q_to_kv, scale)
        part = _unfilled(q, v)
        threads = torch.get_num_threads()
        kernel.dense(_dense(q), _dense(k), _dense(v), self.head_map(tuple(q_to_kv)), scale, threads, *part)
        return part

    def table(self, rows: Sequence[RowSlice]) -> RowTable:
        """Made once for a tuple of rows, which every layer of a step passes anew."""
        if not isinstance(rows, tuple):
            return _table_of(rows)
        found = self._tables.get(id(rows))
        if found is None or found[0] is not rows:
            if len(self._tables) >= KEPT_TABLES:
                self._tables.pop(next(iter(self._tables)), None)
            found = self._tables[id(rows)] = rows, _table_of(rows)
        return found[1]

    def head_map(self, q_to_kv: tuple[int, ...]) -> Tensor:
        """As the kernels take it."""
        found = self._maps.get(q_to_kv)
        if found is None:
            found = self._maps[q_to_kv] = torch.tensor(q_to_kv, dtype=torch.int64)
        return found


def _table_of(rows: Sequence[RowSlice]) -> RowTable:
    table, pages, first = [], [], 0
    for row in rows:
        table.append((row.start, row.stop, row.local_len, first))
        pages.append(row.pages)
        first += len(row.pages)
    none = torch.zeros(0, dtype=torch.int64)
    return RowTable(
        torch.tensor(table, dtype=torch.int64).view(-1, 4), torch.cat(pages).contiguous() if pages else none
    )


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels know these types and sizes."""
    kinds = (torch.float32, torch.bfloat16)
    sizes = q.shape[-1] % kernel.MULTIPLE == 0 and v.shape[-1] % kernel.MULTIPLE == 0
    return sizes and q.dtype in kinds and k.dtype in kinds and v.dtype == k.dtype


def _dense(x: Tensor) -> Tensor:
    """The same with the elements of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _unfilled(q: Tensor, v: Tensor) -> Partial:
    shape = q.shape[:2]
    return Partial(torch.empty(*shape, v.shape[-1]), torch.empty(shape))
