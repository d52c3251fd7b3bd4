"""Figures of a run, by definition; docs/benchmarking.md has the same definitions in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from serving.client import Outcome

SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Latencies:
    """One request that was answered: milliseconds.

    `ttft` and `e2el` count from sending; those `_due` count from the time the request was scheduled for.
    """

    ttft: float
    e2el: float
    ttft_due: float
    e2el_due: float
    queue: float
    """From schedule to sending: waiting for a place or for the client."""
    tpot: float | None
    """Per output token behind the first; a request of one token has none."""
    gaps: list[float]
    """Between a chunk and the next."""
    token_gaps: list[float]
    """The same per token: a gap before a chunk of k tokens is k times a k-th of it."""

    @classmethod
    def of(cls, outcome: Outcome) -> Latencies:
        gaps = [1000 * (after - before) for before, after in pairwise(outcome.chunks)]
        behind = outcome.output_tokens - 1
        return cls(
            ttft=1000 * (outcome.first - outcome.sent),
            e2el=1000 * (outcome.last - outcome.sent),
            ttft_due=1000 * (outcome.first - outcome.scheduled),
            e2el_due=1000 * (outcome.last - outcome.scheduled),
            queue=1000 * (outcome.sent - outcome.scheduled),
            tpot=1000 * (outcome.last - outcome.first) / behind if behind > 0 else None,
            gaps=gaps,
            token_gaps=_per_token(gaps, outcome.tokens_by_chunk),
        )

    def meets(self, slo: dict[str, float]) -> bool:
        """Whether every limit holds, counted from the schedule; without a TPOT, a limit on it does."""
        found = {"ttft": self.ttft_due, "tpot": self.tpot or 0.0, "e2el": self.e2el_due}
        return all(found[name] <= limit for name, limit in slo.items())


def _per_token(gaps: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Gaps shared among the tokens that ended them; empty where the server does not tell them for every chunk."""
    if len(tokens) != len(gaps) + 1:
        return []
    shared: list[float] = []
    for gap, (before, after) in zip(gaps, pairwise(tokens)):
        shared += [gap / (after - before)] * (after - before)
    return shared


@dataclass(frozen=True)
class Stat:
    """Mean, median and percentiles of one figure; without samples there is none."""

    count: int
    mean: float
    median: float
    std: float
    max: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, samples: Sequence[float], percentiles: Sequence[float]) -> Stat | None:
        """Percentiles lie on straight lines between samples, as numpy and the other benchmarks have them."""
        if not samples:
            return None
        a = np.asarray(samples)
        at = {p: float(np.percentile(a, p)) for p in percentiles}
        return cls(len(samples), float(a.mean()), float(np.median(a)), float(a.std()), float(a.max()), at)


@dataclass
class Summary:
    """Figures of one run. Rates are per second of `duration`, tokens those of requests that were answered."""

    requests: int
    completed: int
    duration: float
    """Seconds from the first request's due time to the end of the last."""
    input_tokens: int
    output_tokens: int
    chunks: int
    """Chunks with text."""
    good: int | None
    """Requests that meet every limit; None where none was given."""
    concurrency: float
    """Requests in flight, on average over the duration."""
    peak_concurrency: int
    errors: Counter[str] = field(default_factory=Counter)
    cached_tokens: int | None = None
    """As `usage` tells; None where the server does not."""
    short: int = 0
    """Requests whose output is not as long as asked."""
    other_input: int = 0
    """Requests whose prompt has another length by the server's count than was sent."""
    unseen: int = 0
    """Requests with tokens but no text: their first token is dated to their end."""
    stats: dict[str, Stat] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return self.requests - self.completed

    @property
    def tokens_per_chunk(self) -> float:
        return self.output_tokens / self.chunks if self.chunks else 0.0

    def rate(self, amount: float) -> float:
        """Per second."""
        return amount / self.duration if self.duration else 0.0


def peak(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at any time; one that ends as another is sent does not overlap it."""
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.last, -1) for o in outcomes])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def summarize(outcomes: Sequence[Outcome], slo: dict[str, float], percentiles: Sequence[float]) -> Summary:
    """Figures of all outcomes of a run."""
    done = [outcome for outcome in outcomes if not outcome.error]
    each = [Latencies.of(outcome) for outcome in done]
    begin = min((outcome.scheduled for outcome in outcomes), default=0.0)
    duration = max((outcome.last for outcome in outcomes), default=0.0) - begin
    cached = [outcome.cached_tokens for outcome in done if outcome.cached_tokens is not None]
    summary = Summary(
        requests=len(outcomes),
        completed=len(done),
        duration=duration,
        input_tokens=sum(outcome.input_tokens for outcome in done),
        output_tokens=sum(outcome.output_tokens for outcome in done),
        chunks=sum(len(outcome.chunks) for outcome in done),
        good=sum(one.meets(slo) for one in each) if slo else None,
        concurrency=sum(o.last - o.sent for o in outcomes) / duration if duration else 0.0,
        peak_concurrency=peak(outcomes),
        errors=Counter(outcome.error for outcome in outcomes if outcome.error),
        cached_tokens=sum(cached) if cached else None,
        short=sum(outcome.output_tokens != outcome.asked_output for outcome in done),
        other_input=sum(outcome.input_tokens != outcome.asked_input for outcome in done),
        unseen=sum(not outcome.chunks for outcome in done),
    )
    summary.stats = _stats(each, percentiles)
    return summary


def _stats(each: Sequence[Latencies], percentiles: Sequence[float]) -> dict[str, Stat]:
    """By the names that other benchmarks use in their JSON: `ttft`, `tpot`, `itl`, `e2el`; and those it has beside."""
    samples: dict[str, list[float]] = {
        "ttft": [one.ttft for one in each],
        "tpot": [one.tpot for one in each if one.tpot is not None],
        "itl": [gap for one in each for gap in one.gaps],
        "itl_per_token": [gap for one in each for gap in one.token_gaps],
        "e2el": [one.e2el for one in each],
        "queue": [one.queue for one in each],
        "ttft_from_schedule": [one.ttft_due for one in each],
        "e2el_from_schedule": [one.e2el_due for one in each],
    }
    stats = {name: Stat.of(values, percentiles) for name, values in samples.items()}
    return {name: stat for name, stat in stats.items() if stat is not None}


def as_json(summary: Summary) -> dict[str, Any]:
    """Flat, with the keys that `vllm bench serve` gives the same figures."""
    out: dict[str, Any] = {
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "errors": dict(summary.errors),
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.rate(summary.completed),
        "input_throughput": summary.rate(summary.input_tokens),
        "output_throughput": summary.rate(summary.output_tokens),
        "total_token_throughput": summary.rate(summary.input_tokens + summary.output_tokens),
        "request_goodput": None if summary.good is None else summary.rate(summary.good),
        "concurrency": summary.concurrency,
        "peak_concurrency": summary.peak_concurrency,
        "tokens_per_chunk": summary.tokens_per_chunk,
        "other_output_length": summary.short,
        "other_input_length": summary.other_input,
        "without_text": summary.unseen,
    }
    for name, stat in summary.stats.items():
        out |= {f"mean_{name}_ms": stat.mean, f"median_{name}_ms": stat.median, f"std_{name}_ms": stat.std}
        out |= {f"p{percent:g}_{name}_ms": value for percent, value in stat.percentiles.items()}
        out[f"max_{name}_ms"] = stat.max
    return out
