"""Attention over a cache spread over ranks equals attention over one whole sequence, for every grid and layout."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dcprt.attention.combine import Combine, a2a, ag_rs
from dcprt.attention.dcp import DcpAttention, Queries
from dcprt.attention.plan import AttentionPlan, ContextCosts, RowSlice
from dcprt.attention.registry import make_backend
from dcprt.comm.groups import Groups, local_groups
from dcprt.ids import Rank
from dcprt.kv.layout import Layout
from dcprt.kv.pool import LayerKV
from dcprt.parallel.grid import PADDING, Grid, RankHeads

from .oracle import attend

DIM = 16
GRIDS = [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3), (8, 8)]
LAYOUTS = [(1, 1), (2, 1), (4, 4), (4, 2), (16, 1)]


@dataclass(frozen=True)
class Mode:
    """How the context pass is done; costs decide between gathering queries and gathering K and V."""

    combine: Combine = ag_rs
    costs: ContextCosts = ContextCosts(query_bytes=1, kv_bytes=1 << 20, workspace=1 << 30)
    replicate_q: bool = False
    backend: str = "torch"


GATHER_KV = ContextCosts(query_bytes=1 << 20, kv_bytes=1, workspace=1 << 30)
TIGHT = ContextCosts(query_bytes=10, kv_bytes=10, workspace=70)
MODES = {
    "a2a": Mode(combine=a2a),
    "replicated": Mode(replicate_q=True),
    "replicated-a2a": Mode(combine=a2a, replicate_q=True),
    "gather-kv": Mode(costs=GATHER_KV),
    "both-tight": Mode(costs=TIGHT),
    "both-tight-a2a": Mode(combine=a2a, costs=TIGHT),
    "both-tight-replicated": Mode(costs=TIGHT, replicate_q=True),
}


@dataclass
class Sequence:
    """One request: all its K, V [length, kv_heads, DIM] and Q [length, heads, DIM], and where the chunks end."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: np.ndarray
    ends: list[int]


def pick(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """[tokens, all heads, DIM] to the given heads; zeros for padding, as zero weights give."""
    zero = torch.zeros_like(x[:, :1])
    return torch.cat([zero if h == PADDING else x[:, h : h + 1] for h in heads], dim=1)


class RankRun:
    """One rank computing all chunks of all sequences, together in each step."""

    def __init__(
        self, rank: int, grid: Grid, heads: RankHeads, layout: Layout, groups: Groups, num_pages: int, mode: Mode
    ) -> None:
        shape = (num_pages, layout.page_size, len(heads.kv_heads), DIM)
        self.cache = LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        backend = make_backend(mode.backend)
        self.attention = DcpAttention(heads, DIM**-0.5, backend, groups.dcp, mode.combine, mode.costs)
        self.mode = mode
        self.heads, self.layout, self.dcp_rank = heads, layout, grid.dcp_rank(Rank(rank))
        self.outputs: list[Tensor] = []

    def run(self, sequences: list[Sequence]) -> None:
        for step in range(len(sequences[0].ends)):
            cuts = [(([0, *s.ends])[step], s.ends[step]) for s in sequences]
            plan = self.plan(sequences, cuts)
            q, k, v = (
                torch.cat([getattr(s, name)[a:b] for s, (a, b) in zip(sequences, cuts, strict=True)]) for name in "qkv"
            )
            queries = Queries(pick(q, self.heads.q_heads))
            if self.mode.replicate_q:
                shard = pick(q, self.heads.shard_q_heads)
                queries = Queries(shard[:, self.attention.own_places], shard)
            kv = pick(k, self.heads.kv_heads), pick(v, self.heads.kv_heads)
            self.outputs.append(self.attention(queries, *kv, self.cache, plan))

    def plan(self, sequences: list[Sequence], cuts: list[tuple[int, int]]) -> AttentionPlan:
        rows, tokens, slots, start = [], [], [], 0
        for s, (begin, end) in zip(sequences, cuts, strict=True):
            local = self.layout.local_len(self.dcp_rank, begin)
            stored = self.layout.local_len(self.dcp_rank, end)
            pages = torch.from_numpy(s.pages[: self.layout.local_pages(stored)])
            lens = tuple(self.layout.local_len(r, begin) for r in range(self.layout.dcp))
            rows.append(RowSlice(start, start + end - begin, begin, local, pages, lens))
            new = np.arange(begin, end)
            own = np.flatnonzero(self.layout.owner(new) == self.dcp_rank)
            tokens.append(own + start)
            slots.append(self.layout.slots(new[own], s.pages))
            start += end - begin
        return AttentionPlan(
            tuple(rows), torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(slots))
        )


def run_everywhere(
    grid: Grid, layout: Layout, heads: int, kv_heads: int, sequences: list[Sequence], mode: Mode
) -> list[RankRun]:
    groups = local_groups(grid.tp, grid.dcp)
    num_pages = 1 + sum(len(s.pages) for s in sequences)
    runs = [
        RankRun(r, grid, grid.heads(Rank(r), heads, kv_heads), layout, groups[r], num_pages, mode)
        for r in range(grid.tp)
    ]
    threads = [threading.Thread(target=run.run, args=(sequences,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return runs


def make_sequences(layout: Layout, heads: int, kv_heads: int, chunks: list[list[int]]) -> list[Sequence]:
    sequences, next_page = [], 1
    for sizes in chunks:
        length = sum(sizes)
        count = layout.pages_for(length)
        pages = np.arange(next_page, next_page + count)[::-1].copy()
        next_page += count
        q, k, v = (
            torch.randn(length, heads, DIM),
            torch.randn(length, kv_heads, DIM),
            torch.randn(length, kv_heads, DIM),
        )
        sequences.append(Sequence(q, k, v, pages, np.cumsum(sizes).tolist()))
    return sequences


CHUNKS = [[1, 1, 1, 1], [6, 1, 3, 1], [5, 17, 1, 40], [1, 70, 2, 1]]


def assert_whole(grid: tuple[int, int], layout: tuple[int, int], heads: int, kv_heads: int, mode: Mode) -> None:
    """All ranks together give attention over one whole sequence."""
    torch.manual_seed(0)
    where, cut = Grid(*grid), Layout(layout[0], grid[1], layout[1])
    sequences = make_sequences(cut, heads, kv_heads, CHUNKS)
    runs = run_everywhere(where, cut, heads, kv_heads, sequences, mode)
    group = heads // kv_heads
    expected = []
    for s in sequences:
        length = s.ends[-1]
        expected.append(attend(s.q, s.k, s.v, [h // group for h in range(heads)], range(1, length + 1), DIM**-0.5))
    for run in runs:
        for step, out in enumerate(run.outputs):
            parts = [e[([0, *s.ends])[step] : s.ends[step]] for s, e in zip(sequences, expected, strict=True)]
            own = torch.cat(parts).float()
            for place, head in enumerate(run.heads.q_heads):
                if head != PADDING:
                    torch.testing.assert_close(out[:, place], own[:, head], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (8, 4)])
def test_equals_one_whole_sequence(
    backend_name: str, grid: tuple[int, int], layout: tuple[int, int], heads: int, kv_heads: int
) -> None:
    """K2, K3, K4: short contexts leave ranks empty; chunks are no multiples of anything."""
    assert_whole(grid, layout, heads, kv_heads, Mode(backend=backend_name))


@pytest.mark.parametrize("grid", [(2, 2), (3, 3), (4, 2), (8, 8)], ids=str)
@pytest.mark.parametrize("layout", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(backend_name: str, grid: tuple[int, int], layout: tuple[int, int], mode: str) -> None:
    chosen = dataclasses.replace(MODES[mode], backend=backend_name)
    assert_whole(grid, layout, 9, 3, chosen)
    assert_whole(grid, layout, 4, 1, chosen)


def rows_with(shapes: list[tuple[int, int]]) -> list[RowSlice]:
    """Rows of (context, new) tokens."""
    rows, start = [], 0
    for context, new in shapes:
        rows.append(RowSlice(start, start + new, context, context, torch.zeros(0)))
        start += new
    return rows


def test_schedule_takes_the_cheaper_way_and_each_token_once() -> None:
    costs = ContextCosts(query_bytes=30, kv_bytes=10, workspace=120)
    rows = rows_with([(100, 1), (50, 1), (0, 9), (7, 5), (2, 6), (30, 1)])
    plan = AttentionPlan(tuple(rows), torch.zeros(0), torch.zeros(0))
    schedule = costs.schedule(plan)
    assert [row.start for row in schedule.gather_kv] == [11, 16], "seven and two context tokens are cheap to gather"
    assert [(block.start, block.stop) for block in schedule.blocks] == [(0, 2), (22, 23)]
    long = AttentionPlan(tuple(rows_with([(90, 1), (1000, 11), (50, 1)])), torch.zeros(0), torch.zeros(0))
    blocks = costs.schedule(long).blocks
    assert [(block.start, block.stop) for block in blocks] == [(0, 4), (4, 8), (8, 12), (12, 13)]
    covered = [token for b in blocks for row in b.rows for token in range(b.start + row.start, b.start + row.stop)]
    assert covered == list(range(13))
