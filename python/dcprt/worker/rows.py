"""What a worker remembers of running requests, and how a step plan becomes tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.kv.layout import IntArray, Layout
from dcprt.messages import PlanBody, RowAdd, RowSampling, unpack_tokens
from dcprt.models.base import StepInput
from dcprt.sampling.sampler import SampleRow


class PageTable:
    """A growing int64 array; appending is cheap, `view()` copies nothing."""

    def __init__(self, pages: Sequence[int]) -> None:
        self._len = len(pages)
        self._data: IntArray = np.zeros(max(2 * self._len, 16), dtype=np.int64)
        self._data[: self._len] = pages

    def extend(self, pages: Sequence[int]) -> None:
        needed = self._len + len(pages)
        if needed > len(self._data):
            self._data = np.concatenate([self._data, np.zeros(needed, dtype=np.int64)])
        self._data[self._len : needed] = pages
        self._len = needed

    def view(self) -> IntArray:
        return self._data[: self._len]


@dataclass
class WorkerRow:
    """A running request in this worker. `tokens` grow as they are chosen; the first `computed_len` have KV."""

    tokens: array[int]
    computed_len: int
    pages: PageTable
    sampling: RowSampling

    @classmethod
    def of(cls, add: RowAdd) -> WorkerRow:
        return cls(unpack_tokens(add.token_ids), add.computed_len, PageTable(add.pages), add.sampling)


@dataclass(frozen=True)
class Step:
    """A plan's work as tensors, and which rows get a token: `yielding` and `samples` go with the logits' rows."""

    inputs: StepInput
    yielding: list[int]
    samples: list[SampleRow]


class RowTable:
    """All rows of a worker, by number."""

    def __init__(self, layout: Layout, dcp_rank: int) -> None:
        self._layout = layout
        self._dcp_rank = dcp_rank
        self._rows: dict[int, WorkerRow] = {}

    def update(self, body: PlanBody) -> None:
        """Drop, add and grow rows, in this order."""
        for row in body.drops:
            del self._rows[row]
        for add in body.adds:
            assert add.row not in self._rows, add.row
            self._rows[add.row] = WorkerRow.of(add)
        for growth in body.growth:
            self._rows[growth.row].pages.extend(growth.pages)

    def step(self, body: PlanBody) -> Step:
        """Tensors of `body.work`, which must not be empty."""
        tokens = array("i")
        positions, slices, store_tokens, store_slots = [], [], [], []
        yielding, samples, logit_index = [], [], []
        for work in body.work:
            row, start = self._rows[work.row], len(tokens)
            stop_len = row.computed_len + work.num_tokens
            tokens += row.tokens[row.computed_len : stop_len]
            assert len(tokens) - start == work.num_tokens, "a plan asks for tokens that are not known yet"
            new = np.arange(row.computed_len, stop_len, dtype=np.int64)
            positions.append(new)
            own = np.flatnonzero(self._layout.owner(new) == self._dcp_rank)
            store_tokens.append(own + start)
            store_slots.append(self._layout.slots(new[own], row.pages.view()))
            slices.append(self._slice(row, start, len(tokens)))
            if work.max_new:
                yielding.append(work.row)
                samples.append(SampleRow(row.sampling, stop_len))
                logit_index.append(len(tokens) - 1)
        plan = AttentionPlan(tuple(slices), _tensor(store_tokens), _tensor(store_slots))
        inputs = StepInput(
            token_ids=torch.from_numpy(np.frombuffer(tokens, dtype=np.int32).astype(np.int64)),
            positions=_tensor(positions),
            logit_index=torch.tensor(logit_index, dtype=torch.int64),
            attention=plan,
        )
        return Step(inputs, yielding, samples)

    def advance(self, body: PlanBody, chosen: dict[int, list[int]]) -> None:
        """Note that the work is done, and the tokens it yielded."""
        for work in body.work:
            row = self._rows[work.row]
            row.computed_len += work.num_tokens
            row.tokens.extend(chosen.get(work.row, ()))

    def _slice(self, row: WorkerRow, start: int, stop: int) -> RowSlice:
        local_len = self._layout.local_len(self._dcp_rank, row.computed_len)
        pages = row.pages.view()[: self._layout.local_pages(local_len)]
        return RowSlice(start, stop, row.computed_len, local_len, torch.from_numpy(pages))


def _tensor(parts: list[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
