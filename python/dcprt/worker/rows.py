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
from dcprt.sampling.history import History
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
    prompt_len: int
    computed_len: int
    pages: PageTable
    sampling: RowSampling
    history: History | None

    @classmethod
    def of(cls, add: RowAdd, vocab_size: int) -> WorkerRow:
        tokens = unpack_tokens(add.token_ids)
        history = History(tokens, add.prompt_len, vocab_size) if add.sampling.uses_history else None
        return cls(tokens, add.prompt_len, add.computed_len, PageTable(add.pages), add.sampling, history)

    def accept(self, token: int) -> None:
        """A token was chosen."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)


@dataclass(frozen=True)
class ScoredPrompt:
    """Prompt tokens whose log probabilities are wanted: `tokens` follow the step's tokens from `start` on."""

    row: int
    position: int
    start: int
    tokens: list[int]
    count: int


@dataclass(frozen=True)
class Step:
    """A plan's work as tensors, and what is made of it.

    `yielding` rows get a token each, from the logits at `logit_index`: int64 [rows], with parameters `samples`.
    """

    inputs: StepInput
    logit_index: Tensor
    yielding: list[int]
    samples: list[SampleRow]
    scored: list[ScoredPrompt]


class RowTable:
    """All rows of a worker, by number."""

    def __init__(self, layout: Layout, dcp_rank: int, vocab_size: int) -> None:
        self._layout = layout
        self._dcp_rank = dcp_rank
        self._vocab_size = vocab_size
        self._rows: dict[int, WorkerRow] = {}

    def update(self, body: PlanBody) -> None:
        """Drop, add and grow rows, in this order."""
        for row in body.drops:
            del self._rows[row]
        for add in body.adds:
            assert add.row not in self._rows, add.row
            self._rows[add.row] = WorkerRow.of(add, self._vocab_size)
        for growth in body.growth:
            self._rows[growth.row].pages.extend(growth.pages)

    def step(self, body: PlanBody) -> Step:
        """Tensors of `body.work`, which must not be empty."""
        tokens = array("i")
        positions, slices, store_tokens, store_slots = [], [], [], []
        yielding, samples, logit_index, scored = [], [], [], []
        # At dcp=1 a backend may do both passes as one, for which a row's new tokens do not count as context.
        own_in_context = self._layout.dcp > 1 and all(work.num_tokens == 1 for work in body.work)
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
            slices.append(self._slice(row, start, len(tokens), stop_len if own_in_context else row.computed_len))
            if work.max_new:
                yielding.append(work.row)
                samples.append(SampleRow(row.sampling, stop_len, row.history))
                logit_index.append(len(tokens) - 1)
            if row.sampling.prompt_logprobs >= 0 and (following := self._following(row, stop_len)):
                count = row.sampling.prompt_logprobs
                scored.append(ScoredPrompt(work.row, row.computed_len + 1, start, following, count))
        plan = AttentionPlan(tuple(slices), _tensor(store_tokens), _tensor(store_slots), own_in_context)
        inputs = StepInput(
            token_ids=torch.from_numpy(np.frombuffer(tokens, dtype=np.int32).astype(np.int64)),
            positions=_tensor(positions),
            attention=plan,
        )
        return Step(inputs, torch.tensor(logit_index, dtype=torch.int64), yielding, samples, scored)

    def advance(self, body: PlanBody, chosen: dict[int, list[int]]) -> None:
        """Note that the work is done, and the tokens it yielded."""
        for work in body.work:
            row = self._rows[work.row]
            row.computed_len += work.num_tokens
            for token in chosen.get(work.row, ()):
                row.accept(token)

    @staticmethod
    def _following(row: WorkerRow, stop_len: int) -> list[int]:
        """The prompt tokens that follow those computed now."""
        return list(row.tokens[row.computed_len + 1 : min(stop_len + 1, row.prompt_len)])

    def _slice(self, row: WorkerRow, start: int, stop: int, context_len: int) -> RowSlice:
        local_len = self._layout.local_len(self._dcp_rank, context_len)
        stored = self._layout.local_len(self._dcp_rank, row.computed_len + stop - start)
        pages = row.pages.view()[: self._layout.local_pages(stored)]
        lens = tuple(self._layout.local_len(rank, context_len) for rank in range(self._layout.dcp))
        return RowSlice(start, stop, context_len, local_len, torch.from_numpy(pages), lens)


def _tensor(parts: list[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
