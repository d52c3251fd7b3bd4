"""Decides what is computed in each step. Holds no tensors, knows no ranks, looks at no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dcprt.config import ScheduleConfig
from dcprt.errors import RequestError
from dcprt.ids import Row
from dcprt.messages import (
    PageCopy,
    PlanBody,
    RowAdd,
    RowGrowth,
    RowSampling,
    RowWork,
    TokensOut,
)
from dcprt.scheduler.request import Request, State
from dcprt.scheduler.store import KVStore


@dataclass(frozen=True)
class Limits:
    """What requests must respect. `max_len` counts prompt and output together."""

    context_len: int
    capacity_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def max_len(self) -> int:
        return min(self.context_len, self.capacity_tokens)

    def output_room(self, prompt_len: int, max_tokens: int | None) -> int:
        """The most tokens that may follow a prompt of `prompt_len`.

        Raises:
            RequestError: prompt and output cannot fit together; with both numbers and the limit.
        """
        room = self.max_len - prompt_len
        if room < 1 or (max_tokens is not None and max_tokens > room):
            asked = "at least 1" if max_tokens is None else str(max_tokens)
            raise RequestError(
                f"The prompt has {prompt_len} tokens and {asked} new ones are asked for, "
                f"{prompt_len + (max_tokens or 1)} together; at most {self.max_len} fit "
                f"(context length {self.context_len}, KV capacity {self.capacity_tokens}).",
                param="max_tokens" if prompt_len < self.max_len else "prompt",
                code="context_length_exceeded",
            )
        return room if max_tokens is None else max_tokens


@dataclass
class StepDraft:
    """A plan while it is made."""

    transfer: str
    copies: list[PageCopy] = field(default_factory=list)
    drops: list[Row] = field(default_factory=list)
    adds: list[RowAdd] = field(default_factory=list)
    growth: list[RowGrowth] = field(default_factory=list)
    work: list[tuple[Request, RowWork]] = field(default_factory=list)

    def body(self) -> PlanBody:
        return PlanBody(
            copies=self.copies,
            drops=list(self.drops),
            adds=self.adds,
            growth=self.growth,
            work=[work for _, work in self.work],
        )


@dataclass
class Counters:
    """Totals since the start, in tokens unless the name says otherwise."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """Requests in, step plans out; results in, tokens out.

    The caller alternates `plan()` and `apply()`. Requests are served in order of arrival; when pages run out, the
    one admitted last is preempted: what it computed goes to the cache, and it waits again at the head of the queue.
    """

    def __init__(self, store: KVStore, config: ScheduleConfig, limits: Limits) -> None:
        self.store = store
        self.limits = limits
        self.counters = Counters()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._config = config
        self._live: dict[str, Request] = {}
        self._free_rows = [Row(row) for row in range(config.max_running_requests - 1, -1, -1)]
        self._dropped: list[Row] = []
        self._flight: StepDraft | None = None
        self._plans = 0

    @property
    def idle(self) -> bool:
        return not self._live

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: a live request has the same id.
        """
        if request.rid in self._live:
            raise RequestError(f"A request with id {request.rid!r} is running already.", param="rid")
        self._live[request.rid] = request
        self.waiting.append(request)

    def get(self, rid: str) -> Request | None:
        """The live request with this id."""
        return self._live.get(rid)

    def end(self, rid: str) -> Request | None:
        """Forget a request in whatever state it is and free all it has. None if there is none with this id."""
        request = self._live.pop(rid, None)
        if request is None:
            return None
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.state = State.ENDED
        return request

    def plan(self) -> PlanBody | None:
        """What to compute next; None if there is nothing."""
        assert self._flight is None, "the previous step has not been applied"
        self._plans += 1
        draft = StepDraft(transfer=f"plan {self._plans}")
        preemptions = self.counters.preemptions
        budget = self._schedule_running(draft)
        if self.counters.preemptions == preemptions:
            self._admit(draft, budget)
        if not draft.work:
            self.store.allocator.end_transfer(draft.transfer)
            return None
        draft.drops, self._dropped = self._dropped, []
        self._flight = draft
        self.counters.steps += 1
        return draft.body()

    def apply(self, tokens: list[tuple[int, list[int]]]) -> list[TokensOut]:
        """Take the result of the plan in flight; returns what clients get."""
        draft, self._flight = self._flight, None
        assert draft is not None
        accepted = dict(tokens)
        outputs = []
        for request, work in draft.work:
            if request.state is not State.RUNNING or request.row != work.row:
                continue  # ended while the step was under way
            prefilling = work.num_tokens > 1 or not work.max_new or request.output_len == 0
            request.computed_len += work.num_tokens
            if prefilling:
                self.counters.computed_prompt_tokens += work.num_tokens
                self.store.share(request)
            if work.max_new:
                outputs.append(self._accept(request, accepted[work.row]))
        self.store.allocator.end_transfer(draft.transfer)
        return outputs

    def check(self) -> None:
        """Prove the accounting. Raises AssertionError."""
        self.store.check(self._live.values())
        rows = self._free_rows + [r.row for r in self.running if r.row is not None]
        assert sorted(rows) == list(range(self._config.max_running_requests)), rows

    def _accept(self, request: Request, tokens: list[int]) -> TokensOut:
        finish = None
        taken = []
        for token in tokens:
            request.tokens.append(token)
            taken.append(token)
            if finish := request.finish_after(token, self.limits.eos_token_ids):
                break
        self.counters.generated_tokens += len(taken)
        output = TokensOut(rid=request.rid, token_ids=taken, usage=request.usage, finish=finish)
        if finish:
            self.end(request.rid)
        return output

    def _schedule_running(self, draft: StepDraft) -> int:
        """Decodes first, each one token; then prompts that are partly computed. Returns the budget left."""
        budget = self._config.chunked_prefill_size
        decoding = [r for r in self.running if r.pending_len == 1]
        for request in decoding + [r for r in self.running if r.pending_len > 1]:
            if request.state is not State.RUNNING:
                continue  # preempted to make room for one before it
            count = min(request.pending_len, budget) if request.pending_len > 1 else 1
            if count and self._compute(request, count, draft) and request.pending_len > 1:
                budget -= count
        return budget

    def _compute(self, request: Request, count: int, draft: StepDraft) -> bool:
        """Put `count` tokens of a running request into the plan. False if it had to be preempted."""
        while (pages := self.store.grow(request, request.computed_len + count)) is None:
            victim = self._victim(draft)
            self._preempt(victim)
            if victim is request:
                return False
        assert request.row is not None
        if pages:
            draft.growth.append(RowGrowth(request.row, list(pages)))
        yields = 1 if count == request.pending_len else 0
        draft.work.append((request, RowWork(request.row, count, yields)))
        return True

    def _victim(self, draft: StepDraft) -> Request:
        """The request admitted last that is not in the plan already."""
        planned = {id(request) for request, _ in draft.work}
        return next(r for r in reversed(self.running) if id(r) not in planned)

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        request.preemptions += 1
        self._leave(request)
        request.state = State.WAITING
        request.computed_len = 0
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        """Give up row and pages. Workers hear of it with the next plan, which drops rows before it adds any."""
        assert request.row is not None
        self.store.release(request)
        self.running.remove(request)
        self._free_rows.append(request.row)
        self._dropped.append(request.row)
        request.row = None

    def _admit(self, draft: StepDraft, budget: int) -> None:
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting[0]
            admission = self.store.admit(request, self._spare_pages(), draft.transfer)
            if admission is None:
                break
            self.waiting.popleft()
            count = min(len(request.tokens) - admission.computed_len, budget)
            budget -= count
            self._start(request, admission.computed_len, admission.copy, count, draft)

    def _start(
        self, request: Request, computed_len: int, copy: PageCopy | None, count: int, draft: StepDraft
    ) -> None:
        request.row = self._free_rows.pop()
        request.state = State.RUNNING
        request.computed_len = computed_len
        if request.cached_len is None:
            request.cached_len = min(computed_len, request.prompt_len)
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_tokens += request.cached_len
        self.running.append(request)
        pages = self.store.grow(request, computed_len + count)
        assert pages is not None, "admit() made sure of these"
        if copy:
            draft.copies.append(copy)
        sampling = request.sampling
        draft.adds.append(
            RowAdd(
                row=request.row,
                token_ids=request.tokens.tobytes(),
                computed_len=computed_len,
                pages=list(request.pages),
                sampling=RowSampling(
                    temperature=0.0 if sampling.greedy else sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=max(sampling.top_k, 0),
                    seed=request.seed,
                ),
            )
        )
        yields = 1 if computed_len + count == len(request.tokens) else 0
        draft.work.append((request, RowWork(request.row, count, yields)))

    def _spare_pages(self) -> int:
        """Pages to leave for the running: the rest of prompts under way, and one to grow for each."""
        pages_for = self.store.layout.pages_for
        return sum(max(pages_for(len(r.tokens)) - len(r.pages), 0) + 1 for r in self.running)
