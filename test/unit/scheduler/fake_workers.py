"""Workers whose KV is the digest of a token's whole prefix, so that a mix-up of pages changes what they say.

They execute plans as workers do (copies, rows to drop and add, growth, work), slot by slot on every rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dcprt.ids import NULL_PAGE
from dcprt.kv.layout import Layout
from dcprt.messages import PageCopy, PlanBody, RowWork, StepPlan, StepResult, unpack_tokens
from dcprt.scheduler.executor import PlanReader

from ..kv.content import EMPTY, digests, extend

VOCAB = 97


def next_token(digest: int) -> int:
    """What the model says after a prefix."""
    return digest % VOCAB


def reference(prompt: Sequence[int], max_tokens: int, ends: frozenset[int] = frozenset()) -> tuple[list[int], str]:
    """Output and finish reason by the model alone, without any cache."""
    digest = digests(prompt)[-1]
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(digest))
        if output[-1] in ends:
            return output, "stop"
        digest = extend(digest, output[-1])
    return output, "length"


@dataclass
class FakeRow:
    """A running request in the workers; `prefix[i]` is what must be stored at position i."""

    tokens: array[int]
    computed: int
    pages: list[int]
    prefix: list[int] = field(default_factory=list)

    def know(self, tokens: Sequence[int]) -> None:
        self.prefix += digests(tokens, self.prefix[-1] if self.prefix else EMPTY)


class FakeWorkers:
    """An executor that computes from the stored KV, and refuses plans that no worker could execute."""

    def __init__(self, layout: Layout, num_pages: int, max_rows: int) -> None:
        self.layout = layout
        self.rows: dict[int, FakeRow] = {}
        self.bodies: list[PlanBody] = []
        self.computed_tokens = 0
        self._num_pages = num_pages
        self._max_rows = max_rows
        slots = num_pages * layout.page_size
        self._kv = np.zeros((layout.dcp, slots), dtype=np.int64)
        self._reader = PlanReader()
        self._plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def result(self) -> StepResult:
        plan = self._plans.pop(0)
        body = self._reader.read(plan)
        self.bodies.append(body)
        self._check_copies(body.copies)
        for copy in body.copies:
            self._copy(copy)
        self._update(body)
        self._check_contexts()
        chosen = self._work(body)
        self._check_contexts()
        return StepResult(number=plan.number, epoch=plan.epoch, digest=plan.digest, tokens=chosen)

    @property
    def plan(self) -> PlanBody:
        """The latest plan."""
        return self.bodies[-1]

    def _check_copies(self, copies: list[PageCopy]) -> None:
        sources, targets = {c.src for c in copies}, [c.dst for c in copies]
        assert not sources & set(targets)
        assert len(targets) == len(set(targets))
        for copy in copies:
            assert 0 < copy.length < self.layout.span_tokens
            assert NULL_PAGE < copy.src < self._num_pages
            assert NULL_PAGE < copy.dst < self._num_pages

    def _copy(self, copy: PageCopy) -> None:
        size = self.layout.page_size
        for rank in range(self.layout.dcp):
            count = self.layout.local_len(rank, copy.length)
            src, dst = copy.src * size, copy.dst * size
            self._kv[rank, dst : dst + count] = self._kv[rank, src : src + count]

    def _update(self, body: PlanBody) -> None:
        for row in body.drops:
            del self.rows[row]
        for add in body.adds:
            assert add.row not in self.rows
            assert 0 <= add.row < self._max_rows
            row = FakeRow(unpack_tokens(add.token_ids), add.computed_len, list(add.pages))
            row.know(row.tokens)
            assert row.computed < len(row.tokens), "the last token must be computed for its logits"
            self.rows[add.row] = row
        for growth in body.growth:
            assert growth.pages
            self.rows[growth.row].pages += growth.pages
        for row in self.rows.values():
            assert len(set(row.pages)) == len(row.pages)
            assert all(NULL_PAGE < page < self._num_pages for page in row.pages)

    def _places(self, row: FakeRow, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        assert self.layout.pages_for(stop) <= len(row.pages), "outside the request's own pages"
        positions = np.arange(first, stop, dtype=np.int64)
        return self.layout.owner(positions), self.layout.slots(positions, np.array(row.pages, dtype=np.int64))

    def _check_contexts(self) -> None:
        for number, row in self.rows.items():
            stored = self._kv[self._places(row, 0, row.computed)]
            right = np.array(row.prefix[: row.computed], dtype=np.int64)
            wrong = np.flatnonzero(stored != right)
            assert not len(wrong), f"row {number} reads foreign KV at position {wrong[0]}"

    def _work(self, body: PlanBody) -> list[tuple[int, list[int]]]:
        sources = {copy.src for copy in body.copies}
        written: set[int] = set()
        chosen = []
        assert len({work.row for work in body.work}) == len(body.work)
        for work in body.work:
            row = self.rows[work.row]
            stop = row.computed + work.num_tokens
            assert 1 <= work.num_tokens <= len(row.tokens) - row.computed
            assert work.max_new == (1 if stop == len(row.tokens) else 0)
            touched = set(row.pages[self.layout.span(row.computed) : self.layout.pages_for(stop)])
            assert not touched & sources, "a source of this plan is written"
            assert not touched & written, "two rows write one page"
            written |= touched
            chosen += self._compute(work, row, stop)
        return chosen

    def _compute(self, work: RowWork, row: FakeRow, stop: int) -> list[tuple[int, list[int]]]:
        """The new KV follows from the stored KV of the token before it."""
        digest = EMPTY
        if row.computed:
            owner, slot = self._places(row, row.computed - 1, row.computed)
            digest = int(self._kv[owner, slot][0])
        values = digests(row.tokens[row.computed : stop], digest)
        self._kv[self._places(row, row.computed, stop)] = values
        row.computed = stop
        self.computed_tokens += work.num_tokens
        if not work.max_new:
            return []
        token = next_token(values[-1])
        row.tokens.append(token)
        row.know([token])
        return [(work.row, [token])]
