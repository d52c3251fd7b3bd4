"""What every adapter speaks: a job on standard input, one JSON object a line on standard output.

Runs under the Python of each system, so it imports nothing beyond the standard library. The workloads, their order,
their clocks and their token ids are here and nowhere else: an adapter cannot measure something different.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

VOCABULARY = range(1000, 49000)
"""Ordinary tokens of the demo model: no control tokens."""

PHRASE = 40
"""Tokens after which a prompt repeats itself: the model goes on repeating it and is sure of every token, so that the
new tokens of two systems can be compared although their roundings differ."""


@dataclass(frozen=True)
class Workload:
    """Requests of one shape, all sent at once."""

    name: str
    title: str
    requests: int
    prompt: int
    new: int
    warm_prompt: int
    warm_new: int


WORKLOADS = {
    "a": Workload("a", "decode, 128 prompt + 128 new", 1, 128, 128, 128, 16),
    "b": Workload("b", "offline, 32 x (256 + 128)", 32, 256, 128, 64, 8),
    "c": Workload("c", "prefill of 4096", 1, 4096, 1, 4096, 1),
    "d": Workload("d", "decode after 7000", 1, 7000, 64, 1024, 16),
}
KV_TOKENS = max(w.requests * (w.prompt + w.new) for w in WORKLOADS.values())
LONGEST = max(w.prompt + w.new for w in WORKLOADS.values())


@dataclass(frozen=True)
class Job:
    """What an adapter is asked to do: one round of these workloads. Each round has token ids of its own."""

    model: str
    threads: int
    workloads: list[str]
    round: int


@dataclass(frozen=True)
class Streamed:
    """Tokens of one request, and when each was there (`time.perf_counter`)."""

    tokens: list[int]
    times: list[float]


class Emit(Protocol):
    """Tells the driver."""

    def __call__(self, event: str, **values: Any) -> None: ...


class System(Protocol):
    """One runtime with the model loaded. Greedy, no end token, no reuse between requests."""

    def stream(self, prompt: list[int], new: int) -> Streamed:
        """One request alone."""

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """All requests at once; returns when the last one is done, with the new tokens of each."""

    def versions(self) -> dict[str, str]:
        """Packages and settings that the figures depend on."""

    def close(self) -> None:
        """End what was started."""


def run(open_system: Callable[[Job], System]) -> None:
    """Do the job on standard input; the whole of an adapter's main program.

    The driver reads a private copy of standard output; what a library prints goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: str, **values: Any) -> None:
        out.write(json.dumps({"event": event, **values}) + "\n")

    job = Job(**json.loads(sys.stdin.readline()))
    system = open_system(job)
    system.stream(prompts(WORKLOADS["a"], job.round, warm=True)[0], 1)
    emit("first_token", versions=system.versions())
    for workload in map(WORKLOADS.__getitem__, job.workloads):
        _once(system, workload, prompts(workload, job.round, warm=True), workload.warm_new)
        texts = prompts(workload, job.round)
        emit("begin")
        rate, tokens = _once(system, workload, texts, workload.new)
        emit("end")
        emit("rate", workload=workload.name, rate=rate, tokens=tokens)
    system.close()


def prompts(workload: Workload, number: int, *, warm: bool = False) -> list[list[int]]:
    """The same token ids in every system; others for warming up, so that nothing can be reused."""
    chosen = random.Random(f"{workload.name} {number} {warm}")
    length = workload.warm_prompt if warm else workload.prompt
    phrases = [chosen.choices(VOCABULARY, k=PHRASE) for _ in range(workload.requests)]
    return [(phrase * (length // PHRASE + 1))[:length] for phrase in phrases]


def _once(system: System, workload: Workload, texts: list[list[int]], new: int) -> tuple[float, list[int]]:
    """Tokens a second, and the new tokens of the first request."""
    begin = time.perf_counter()
    if workload.requests > 1:
        outputs = system.batch(texts, new)
        seconds = time.perf_counter() - begin
        _check(all(len(tokens) == new for tokens in outputs), f"not {new} new tokens for each request")
        return sum(map(len, outputs)) / seconds, outputs[0]
    found = system.stream(texts[0], new)
    _check(len(found.tokens) == len(found.times) == new, f"{len(found.tokens)} new tokens instead of {new}")
    if new == 1:
        return len(texts[0]) / (found.times[0] - begin), found.tokens
    return (new - 1) / (found.times[-1] - found.times[0]), found.tokens


def _check(ok: bool, problem: str) -> None:
    if not ok:
        raise SystemExit(f"The system produced {problem}.")
