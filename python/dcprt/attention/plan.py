"""The data of one step that attention needs, the same for every layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowSlice:
    """One row of a step on one rank.

    `start`, `stop`: its new tokens in the step's flat token order. `context_len`: tokens cached before the step, over
    all ranks; `local_len` of them on this rank, in the first slots of `pages` (int64 [pages]), which have room for the
    new tokens too.
    `local_lens` are those of every dcp rank.
    """

    start: int
    stop: int
    context_len: int
    local_len: int
    pages: Tensor
    local_lens: tuple[int, ...] = ()

    @property
    def new_len(self) -> int:
        return self.stop - self.start

    def clipped(self, start: int, stop: int) -> RowSlice:
        """The part of it in tokens `start` to `stop`, counted from `start`."""
        return dataclasses.replace(self, start=max(self.start, start) - start, stop=min(self.stop, stop) - start)


@dataclass(frozen=True)
class AttentionPlan:
    """All rows of a step, in token order.

    `store_tokens`, `store_slots`: int64 [owned]; which new tokens this rank owns, and the slots they go to.
    `any_context` is what every rank knows alike, so it decides whether the context pass is run at all.

    With `own_in_context`, each row has one new token, which its context counts already: a token sees itself, so once
    its KV is stored the context pass is all of its attention.
    """

    rows: tuple[RowSlice, ...]
    store_tokens: Tensor
    store_slots: Tensor
    own_in_context: bool = False

    @property
    def any_context(self) -> bool:
        return any(row.context_len for row in self.rows)


@dataclass(frozen=True)
class QueryBlock:
    """Consecutive tokens `start` to `stop` whose queries are gathered together, and their rows, counted from there."""

    start: int
    stop: int
    rows: tuple[RowSlice, ...]


@dataclass(frozen=True)
class ContextSchedule:
    """How the context pass of a step is cut: which rows gather queries, in which blocks, and which gather K and V.

    Every rank makes the same schedule, since it follows from lengths that all know alike.
    """

    blocks: tuple[QueryBlock, ...]
    gather_kv: tuple[RowSlice, ...]


@dataclass(frozen=True)
class ContextCosts:
    """Bytes moved: per new token if queries are gathered (and outputs combined), per context token if K and V are.

    `workspace` bounds what is gathered at a time, in bytes.
    """

    query_bytes: int
    kv_bytes: int
    workspace: int

    @property
    def block_tokens(self) -> int:
        """Most new tokens of a block."""
        return max(self.workspace // self.query_bytes, 1)

    @property
    def chunk_tokens(self) -> int:
        """Most context tokens gathered at a time, over all ranks."""
        return max(self.workspace // self.kv_bytes, 1)

    def schedule(self, plan: AttentionPlan) -> ContextSchedule:
        """Rows without context take no part; each other row takes the way that moves fewer bytes."""
        runs: list[list[RowSlice]] = []
        gather_kv = []
        for row in plan.rows:
            if not row.context_len:
                continue
            if row.context_len * self.kv_bytes < row.new_len * self.query_bytes:
                gather_kv.append(row)
            elif runs and runs[-1][-1].stop == row.start:
                runs[-1].append(row)
            else:
                runs.append([row])
        blocks = [block for run in runs for block in self._cut(run)]
        return ContextSchedule(tuple(blocks), tuple(gather_kv))

    def _cut(self, run: list[RowSlice]) -> list[QueryBlock]:
        """Consecutive rows into blocks that fit the workspace; a row may be cut too."""
        blocks = []
        for start in range(run[0].start, run[-1].stop, self.block_tokens):
            stop = min(start + self.block_tokens, run[-1].stop)
            rows = tuple(row.clipped(start, stop) for row in run if row.start < stop and row.stop > start)
            blocks.append(QueryBlock(start, stop, rows))
        return blocks
