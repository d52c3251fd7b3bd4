"""A request as the scheduler sees it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from dcprt.ids import PageId, Row
from dcprt.kv.radix import Node
from dcprt.messages import Finish, SamplingParams, Usage


class State(enum.Enum):
    """Where a request is. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """Tokens, pages and progress of one request.

    Invariants while running: `len(pages) >= pages_for(computed_len)`; the pages not in `owned` belong to the radix
    tree, are whole spans, and stay while `node` is locked; the tokens from `computed_len` on have no KV yet.
    """

    rid: str
    tokens: array[int]
    prompt_len: int
    max_tokens: int
    sampling: SamplingParams
    seed: int
    namespace: str = ""
    arrival: float = 0.0

    state: State = State.WAITING
    computed_len: int = 0
    cached_len: int | None = None
    pages: list[PageId] = field(default_factory=list)
    owned: set[PageId] = field(default_factory=set)
    node: Node | None = None
    row: Row | None = None
    preemptions: int = 0
    first_token: float | None = None

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def pending_len(self) -> int:
        """Tokens known but not computed: 1 while decoding."""
        return len(self.tokens) - self.computed_len

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
