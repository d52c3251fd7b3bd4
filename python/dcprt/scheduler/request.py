"""A request as the scheduler sees it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from dcprt.ids import PageId, Row
from dcprt.kv.radix import Node
from dcprt.messages import Finish, RowSampling, TokenLogprobs, Usage
from dcprt.params import SamplingParams


class State(enum.Enum):
    """Where a request is. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """Tokens, pages and progress of one request.

    `computed_len` counts the tokens that plans sent so far compute: whatever a later plan does, their KV is there.
    `in_flight` counts the tokens that such plans choose, whose results are not back; they are not in `tokens` yet.

    Invariants while running: `len(pages) >= pages_for(computed_len)`; the pages not in `owned` belong to the radix
    tree, are whole spans, and stay while `node` is locked.
    """

    rid: str
    tokens: array[int]
    prompt_len: int
    max_tokens: int
    sampling: SamplingParams
    seed: int
    namespace: str = ""
    arrival: float = 0.0
    deadline: float | None = None

    state: State = State.WAITING
    computed_len: int = 0
    in_flight: int = 0
    admissions: int = 0
    cached_len: int | None = None
    pages: list[PageId] = field(default_factory=list)
    owned: set[PageId] = field(default_factory=set)
    node: Node | None = None
    row: Row | None = None
    preemptions: int = 0
    first_token: float | None = None
    last_token: float | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def pending_len(self) -> int:
        """Tokens that could be computed next, known to the workers at least: 1 while decoding."""
        return len(self.tokens) + self.in_flight - self.computed_len

    @property
    def output_left(self) -> int:
        """Tokens that may still be chosen, behind those in flight."""
        return self.max_tokens - self.output_len - self.in_flight

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes the token chosen last, to choose another."""
        return self.output_len + self.in_flight > 0 and self.pending_len == 1

    @property
    def reads_cache(self) -> bool:
        """Whether it may skip what is cached; not while log probabilities of its prompt are missing."""
        return self.sampling.prompt_logprobs is None or len(self.prompt_logprobs) >= self.prompt_len - 1

    def row_sampling(self, eos: frozenset[int]) -> RowSampling:
        """What the workers need to choose its tokens."""
        params = self.sampling
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        return RowSampling(
            temperature=0.0 if params.greedy else params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=self.seed,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=sorted(params.logit_bias.items()),
            min_len=self.prompt_len + params.min_tokens if params.min_tokens else 0,
            end_ids=sorted(ends) if params.min_tokens else [],
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        )

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.output_len,
            cached_tokens=self.cached_len or 0,
        )

    def finish_after(self, token: int, eos: frozenset[int]) -> Finish | None:
        """Why the request ends with `token`, which has just been appended; None if it goes on."""
        if token in self.sampling.stop_token_ids or (token in eos and not self.sampling.ignore_eos):
            return Finish(reason="stop", matched=token)
        if self.output_len >= self.max_tokens:
            return Finish(reason="length")
        return None
