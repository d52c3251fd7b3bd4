"""Decides what is computed in each step. Holds no tensors, knows no ranks, looks at no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcprt.config import ScheduleConfig
from dcprt.errors import RequestError
from dcprt.ids import Row
from dcprt.kv.radix import common_len
from dcprt.messages import (
    Finish,
    PageCopy,
    PlanBody,
    RequestFailed,
    RowAdd,
    RowGrowth,
    RowLogprobs,
    RowWork,
    TokenLogprobs,
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
        wanted = 1 if max_tokens is None else max_tokens
        if wanted > room:
            asked = "at least 1" if max_tokens is None else str(max_tokens)
            raise RequestError(
                f"The prompt has {prompt_len} tokens and {asked} new ones are asked for, "
                f"{prompt_len + wanted} together; at most {self.max_len} fit "
                f"(context length {self.context_len}, KV capacity {self.capacity_tokens}).",
                param="max_tokens" if prompt_len < self.max_len else "prompt",
                code="context_length_exceeded",
            )
        return room if max_tokens is None else max_tokens


@dataclass(frozen=True)
class Work:
    """What a plan does for a request.

    `admission` says for which of its stays among the running, `prompt` whether it is prefill, `whole` whether all
    tokens known so far are computed then.
    """

    request: Request
    admission: int
    row_work: RowWork
    prompt: bool
    whole: bool

    @property
    def is_current(self) -> bool:
        """Whether the result is of use. A request preempted since takes it too, so that it gets ahead each time."""
        return self.request.state is not State.ENDED and self.request.admissions == self.admission


@dataclass
class StepDraft:
    """A plan while it is made."""

    transfer: str
    copies: list[PageCopy] = field(default_factory=list)
    drops: list[Row] = field(default_factory=list)
    adds: list[RowAdd] = field(default_factory=list)
    growth: list[RowGrowth] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    def body(self) -> PlanBody:
        return PlanBody(
            copies=self.copies,
            drops=list(self.drops),
            adds=self.adds,
            growth=self.growth,
            work=[work.row_work for work in self.work],
        )


@dataclass
class Counters:
    """Totals since the start, in tokens unless the name says otherwise.

    `prefilled_tokens` were computed as prompt; a preempted request's output counts again when it resumes.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """Requests in, step plans out; results in, tokens out.

    The caller may ask for the next plan before the result of the last one is back: a row whose token is still being
    chosen goes on with it, since the workers know it. If that token ends the request, the next is dropped.

    Requests are served in order of arrival; when pages run out, the one admitted last is preempted: what it computed
    goes to the cache, and it waits again at the head of the queue.
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
        self._flights: deque[StepDraft] = deque()
        self._plans = 0

    @property
    def idle(self) -> bool:
        return not self._live

    @property
    def free_rows(self) -> int:
        """Requests that could be admitted as far as rows go."""
        return len(self._free_rows)

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
        """What to compute next; None if nothing can be, before a result or a request comes."""
        self._plans += 1
        draft = StepDraft(transfer=f"plan {self._plans}")
        preemptions = self.counters.preemptions
        budget = self._schedule_running(draft)
        if self.counters.preemptions == preemptions:
            self._admit(draft, budget)
        if not draft.work:
            return None
        draft.drops, self._dropped = self._dropped, []
        self._flights.append(draft)
        self._advance(draft)
        return draft.body()

    def apply(
        self,
        tokens: Sequence[tuple[int, list[int]]],
        logprobs: Sequence[RowLogprobs] = (),
        prompt_logprobs: Sequence[RowLogprobs] = (),
        failed: Sequence[tuple[int, str]] = (),
    ) -> list[TokensOut | RequestFailed]:
        """Take the result of the oldest plan in flight; returns what clients get."""
        draft = self._flights.popleft()
        accepted, found = dict(tokens), {entry.row: entry.tokens for entry in logprobs}
        scored, reasons = {entry.row: entry for entry in prompt_logprobs}, dict(failed)
        outputs: list[TokensOut | RequestFailed] = []
        for work in draft.work:
            request, row = work.request, work.row_work.row
            if not work.is_current:
                continue
            if row in reasons:
                outputs.append(self._fail(request, reasons[row]))
                continue
            if entry := scored.get(row):
                request.prompt_logprobs.update(enumerate(entry.tokens, entry.position))
            if work.row_work.max_new:
                request.in_flight = max(request.in_flight - work.row_work.max_new, 0)
                outputs.append(self._accept(request, accepted[row], found.get(row, [])))
            elif work.whole and not request.max_tokens:
                outputs.append(self._output(request, [], [], Finish(reason="length")))
        self.store.allocator.end_transfer(draft.transfer)
        return outputs

    def check(self) -> None:
        """Prove the accounting. Raises AssertionError."""
        self.store.check(self._live.values())
        rows = self._free_rows + [r.row for r in self.running if r.row is not None]
        assert sorted(rows) == list(range(self._config.max_running_requests)), rows

    def _advance(self, draft: StepDraft) -> None:
        """The plan is as good as executed: nothing that is planned later can come before it."""
        self.counters.steps += 1
        for work in draft.work:
            request = work.request
            request.computed_len += work.row_work.num_tokens
            request.in_flight += work.row_work.max_new
            if work.prompt:
                self.counters.prefilled_tokens += work.row_work.num_tokens
                self.store.share(request)

    def _fail(self, request: Request, reason: str) -> RequestFailed:
        """This request alone: others get nothing of what it computed."""
        self.store.discard(request)
        self.end(request.rid)
        where = len(request.tokens)
        return RequestFailed(rid=request.rid, message=f"Token {where} cannot be chosen: {reason}.", status=500)

    def _accept(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs]) -> TokensOut:
        finish = None
        taken = []
        for token in tokens:
            request.tokens.append(token)
            taken.append(token)
            if finish := request.finish_after(token, self.limits.eos_token_ids):
                break
        self.counters.generated_tokens += len(taken)
        return self._output(request, taken, logprobs[: len(taken)], finish)

    def _output(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs], finish: Finish | None
    ) -> TokensOut:
        """A message to the client; the first one has the prompt's log probabilities. Ends the request, if so."""
        prompt_logprobs: list[TokenLogprobs] = []
        if request.prompt_logprobs and request.output_len == len(tokens):
            prompt_logprobs = [request.prompt_logprobs[i] for i in range(1, request.prompt_len)]
        if finish:
            self.end(request.rid)
        return TokensOut(
            rid=request.rid,
            token_ids=tokens,
            usage=request.usage,
            finish=finish,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _schedule_running(self, draft: StepDraft) -> int:
        """Decodes first, each one token; then prompts that are partly computed. Returns the budget left."""
        budget = self._config.chunked_prefill_size
        decoding = [r for r in self.running if r.is_decoding and r.output_left]
        for request in decoding + [r for r in self.running if r.pending_len and not r.is_decoding]:
            if request.state is not State.RUNNING:
                continue  # preempted to make room for one before it
            count = 1 if request.is_decoding else min(request.pending_len, budget)
            prefilled = 0 if request.is_decoding else count
            if count and self._compute(request, count, draft):
                budget -= prefilled
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
        self._work(request, count, draft)
        return True

    def _work(self, request: Request, count: int, draft: StepDraft) -> None:
        """The row yields a token where its last known token is computed, if it may have one more."""
        assert request.row is not None
        whole = count == request.pending_len
        row_work = RowWork(request.row, count, 1 if whole and request.output_left else 0)
        draft.work.append(Work(request, request.admissions, row_work, not request.is_decoding, whole))

    def _victim(self, draft: StepDraft) -> Request:
        """The request admitted last that is not in the plan already."""
        planned = {id(work.request) for work in draft.work}
        return next(r for r in reversed(self.running) if id(r) not in planned)

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        request.preemptions += 1
        self._leave(request)
        request.state = State.WAITING
        request.computed_len = request.in_flight = 0
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
            if self._is_worth_waiting(request, draft):
                break
            admission = self.store.admit(request, self._spare_pages(), draft.transfer)
            if admission is None:
                break
            self.waiting.popleft()
            count = min(len(request.tokens) - admission.computed_len, budget)
            budget -= count
            self._start(request, admission.computed_len, admission.copy, count, draft)

    def _start(self, request: Request, computed_len: int, copy: PageCopy | None, count: int, draft: StepDraft) -> None:
        request.row = self._free_rows.pop()
        request.state = State.RUNNING
        request.admissions += 1
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
        draft.adds.append(
            RowAdd(
                row=request.row,
                token_ids=request.tokens.tobytes(),
                computed_len=computed_len,
                pages=list(request.pages),
                sampling=request.row_sampling(self.limits.eos_token_ids),
                prompt_len=request.prompt_len,
            )
        )
        self._work(request, count, draft)

    def _is_worth_waiting(self, request: Request, draft: StepDraft) -> bool:
        """Whether a prompt under way will soon have computed at least a span more that this request can share."""
        if not (self.store.reuse and request.reads_cache):
            return False
        starting = {id(work.request) for work in draft.work if work.prompt}
        for other in self.running:
            if (id(other) in starting or not other.is_decoding) and other.namespace == request.namespace:
                assert other.node is not None
                shared = self.store.layout.floor_to_span(common_len(other.tokens, request.tokens[:-1]))
                if shared > other.node.end:
                    return True
        return False

    def _spare_pages(self) -> int:
        """Pages to leave for the running: the rest of prompts under way, and one to grow for each."""
        pages_for = self.store.layout.pages_for
        return sum(max(pages_for(len(r.tokens)) - len(r.pages), 0) + 1 for r in self.running)
