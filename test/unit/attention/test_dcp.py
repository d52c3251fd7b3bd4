"""Attention over a cache spread over ranks equals attention over one whole sequence, for every grid and layout."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dcprt.attention.dcp import DcpAttention
from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.torch_backend import TorchBackend
from dcprt.comm.groups import Groups, local_groups
from dcprt.ids import Rank
from dcprt.kv.layout import Layout
from dcprt.kv.pool import LayerKV
from dcprt.parallel.grid import PADDING, Grid, RankHeads

from .oracle import attend

DIM = 16
GRIDS = [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3), (8, 8)]
LAYOUTS = [(1, 1), (2, 1), (4, 4), (4, 2), (16, 1)]


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

    def __init__(self, rank: int, grid: Grid, heads: RankHeads, layout: Layout, groups: Groups, num_pages: int) -> None:
        shape = (num_pages, layout.page_size, len(heads.kv_heads), DIM)
        self.cache = LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        self.attention = DcpAttention(heads, DIM, TorchBackend(), groups.dcp)
        self.heads, self.layout, self.dcp_rank = heads, layout, grid.dcp_rank(Rank(rank))
        self.outputs: list[Tensor] = []

    def run(self, sequences: list[Sequence]) -> None:
        for step in range(len(sequences[0].ends)):
            cuts = [(([0, *s.ends])[step], s.ends[step]) for s in sequences]
            plan = self.plan(sequences, cuts)
            q, k, v = (
                torch.cat([getattr(s, name)[a:b] for s, (a, b) in zip(sequences, cuts, strict=True)]) for name in "qkv"
            )
            own = pick(q, self.heads.q_heads)
            kv = pick(k, self.heads.kv_heads), pick(v, self.heads.kv_heads)
            self.outputs.append(self.attention(own, *kv, self.cache, plan))

    def plan(self, sequences: list[Sequence], cuts: list[tuple[int, int]]) -> AttentionPlan:
        rows, tokens, slots, start = [], [], [], 0
        for s, (begin, end) in zip(sequences, cuts, strict=True):
            local = self.layout.local_len(self.dcp_rank, begin)
            pages = torch.from_numpy(s.pages[: self.layout.local_pages(local)])
            rows.append(RowSlice(start, start + end - begin, begin, local, pages))
            new = np.arange(begin, end)
            own = np.flatnonzero(self.layout.owner(new) == self.dcp_rank)
            tokens.append(own + start)
            slots.append(self.layout.slots(new[own], s.pages))
            start += end - begin
        return AttentionPlan(
            tuple(rows), torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(slots))
        )


def run_everywhere(grid: Grid, layout: Layout, heads: int, kv_heads: int, sequences: list[Sequence]) -> list[RankRun]:
    groups = local_groups(grid.tp, grid.dcp)
    num_pages = 1 + sum(len(s.pages) for s in sequences)
    runs = [
        RankRun(r, grid, grid.heads(Rank(r), heads, kv_heads), layout, groups[r], num_pages) for r in range(grid.tp)
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
        q, k, v = torch.randn(length, heads, DIM), torch.randn(length, kv_heads, DIM), torch.randn(length, kv_heads, DIM)
        sequences.append(Sequence(q, k, v, pages, np.cumsum(sizes).tolist()))
    return sequences


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (8, 4)])
def test_equals_one_whole_sequence(
    grid: tuple[int, int], layout: tuple[int, int], heads: int, kv_heads: int
) -> None:
    """K2, K3, K4: short contexts leave ranks empty; chunks are no multiples of anything."""
    torch.manual_seed(0)
    where, cut = Grid(*grid), Layout(layout[0], grid[1], layout[1])
    sequences = make_sequences(cut, heads, kv_heads, [[1, 1, 1, 1], [6, 1, 3, 1], [5, 17, 1, 40], [1, 70, 2, 1]])
    runs = run_everywhere(where, cut, heads, kv_heads, sequences)
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
