"""Figures by their definitions."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from serving.client import Outcome
from serving.measures import Latencies, Stat, as_json, peak, summarize


def outcome(
    *, due: float = 0.0, sent: float | None = None, chunks: tuple[float, ...] = (1.0,), **fields: Any
) -> Outcome:
    """A request of `chunks` tokens, one a chunk, that ends with the last, unless `fields` say otherwise."""
    last = chunks[-1] if chunks else 1.0
    given = {"input_tokens": 10, "asked_input": 10, "output_tokens": len(chunks), "asked_output": len(chunks)}
    return Outcome(due, due if sent is None else sent, list(chunks), **{"last": last, **given, **fields})


def test_one_request() -> None:
    one = Latencies.of(outcome(due=1, sent=1.5, chunks=(2.0, 2.25, 3.0), last=3.5, output_tokens=4))
    assert (one.ttft, one.ttft_due, one.queue) == (500, 1000, 500)
    assert (one.e2el, one.e2el_due) == (2000, 2500)
    assert one.tpot == pytest.approx(1500 / 3)
    assert one.gaps == [250, 750]
    assert one.token_gaps == []


def test_one_token_has_no_time_per_output_token() -> None:
    assert Latencies.of(outcome(chunks=(2.0,))).tpot is None


def test_a_chunk_of_several_tokens_is_one_gap_but_several_tokens() -> None:
    one = Latencies.of(outcome(chunks=(1.0, 1.5, 2.5), output_tokens=7, tokens_by_chunk=[1, 3, 7]))
    assert one.gaps == [500, 1000]
    assert one.token_gaps == [250, 250, 250, 250, 250, 250]
    assert sum(one.token_gaps) == sum(one.gaps)
    assert one.tpot == 1500 / 6


def test_without_text_the_first_token_is_dated_to_the_end() -> None:
    silent = outcome(sent=1, chunks=(), last=3.0, output_tokens=5, asked_output=5)
    assert Latencies.of(silent).ttft == 2000
    assert Latencies.of(silent).tpot == 0
    assert summarize([silent], {}, [99]).unseen == 1


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 1000}, True),
        ({"ttft": 999}, False),
        ({"tpot": 250}, True),
        ({"tpot": 249, "ttft": 5000}, False),
        ({"e2el": 1500, "tpot": 250, "ttft": 1000}, True),
        ({"e2el": 1499}, False),
        ({}, True),
    ],
)
def test_limits_hold_from_the_schedule(slo: dict[str, float], good: bool) -> None:
    one = Latencies.of(outcome(due=1, sent=1.75, chunks=(2.0, 2.25, 2.5)))
    assert (one.ttft, one.ttft_due) == (250, 1000)
    assert one.meets(slo) is good


def test_statistics_against_the_standard_library() -> None:
    samples = [5.0, 1.0, 9.0, 2.5, 7.0, 7.0, 3.0]
    stat = Stat.of(samples, [25, 50, 90])
    assert stat
    assert (stat.count, stat.max) == (7, 9)
    assert (stat.mean, stat.median) == (pytest.approx(statistics.mean(samples)), statistics.median(samples))
    assert stat.std == pytest.approx(statistics.pstdev(samples))
    cuts = statistics.quantiles(samples, n=20, method="inclusive")
    assert stat.percentiles == pytest.approx({25: cuts[4], 50: cuts[9], 90: cuts[17]})
    assert Stat.of([], [99]) is None


def test_rates_count_what_was_answered_over_the_whole_time() -> None:
    summary = summarize(
        [
            outcome(due=2, chunks=(3.0, 4.0)),
            outcome(due=3, sent=5, chunks=(6.0, 8.0), cached_tokens=4),
            outcome(due=4, chunks=(), last=12.0, input_tokens=0, output_tokens=0, error="HTTP 500: no"),
        ],
        {"e2el": 2500},
        [50.0],
    )
    assert (summary.requests, summary.completed, summary.failed) == (3, 2, 1)
    assert summary.duration == 10
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (20, 4, 4)
    assert summary.good == 1
    assert summary.concurrency == (2 + 3 + 8) / 10
    assert summary.stats["ttft"].mean == 1000
    assert summary.stats["ttft_from_schedule"].max == 3000
    told = as_json(summary)
    assert told["request_throughput"] == 0.2
    assert told["request_goodput"] == 0.1
    assert told["output_throughput"] == 0.4
    assert told["total_token_throughput"] == 2.4
    assert told["errors"] == {"HTTP 500: no": 1}
    assert told["p50_ttft_ms"] == told["median_ttft_ms"] == 1000


def test_lengths_that_differ_are_counted() -> None:
    summary = summarize([outcome(asked_output=9), outcome(asked_input=11), outcome()], {}, [99])
    assert (summary.short, summary.other_input) == (1, 1)
    assert summary.good is None
    assert as_json(summary)["request_goodput"] is None


def test_tokens_per_chunk() -> None:
    summary = summarize([outcome(chunks=(1, 2), output_tokens=6), outcome(chunks=(1, 2), output_tokens=2)], {}, [99])
    assert summary.tokens_per_chunk == 2


def test_peak_of_requests_in_flight() -> None:
    spans = [(0, 4), (1, 2), (2, 3), (3, 5)]
    assert peak([outcome(sent=a, chunks=(b,)) for a, b in spans]) == 2
    assert peak([outcome(sent=a, chunks=(b + 0.5,)) for a, b in spans]) == 3
    assert peak([]) == 0


def test_nothing_at_all() -> None:
    summary = summarize([], {"ttft": 1}, [99])
    assert (summary.completed, summary.duration, summary.rate(5), summary.stats) == (0, 0, 0, {})
