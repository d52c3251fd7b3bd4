"""Tables and flags."""

from __future__ import annotations

import math
import re

import pytest

from serving import options
from serving.client import Outcome
from serving.measures import as_json, summarize
from serving.report import comparison, load_words, table


def outcome(wait: float = 0.0, error: str = "") -> Outcome:
    """Ten tokens in, two out, after 100 and 150 ms."""
    sent = 1 + wait
    return Outcome(1.0, sent, [sent + 0.1, sent + 0.15], [], sent + 0.15, 10, 2, 10, 2, None, error)


def rows(text: str) -> dict[str, list[str]]:
    """Cells by the label of their row."""
    found = (re.split(r"\s{2,}", row.strip()) for row in text.splitlines() if row.strip())
    return {first: rest for first, *rest in found}


def test_a_table_has_every_figure() -> None:
    shown = rows(
        table(
            summarize([outcome()] * 3, {"ttft": 100.5}, [90, 99]),
            {"x": 0.25, "y": None},
            {"ttft": 100.5},
            scheduled=True,
        )
    )
    assert shown["Successful requests"] == ["3"]
    assert shown["Total generated tokens"] == ["6"]
    assert shown["Request throughput (req/s)"] == shown["Request goodput (req/s)"] == ["20.000"]
    assert shown["meet ttft 100.5 ms"] == ["3"]
    assert shown["Prefix hit rate, x"] == ["25.0%"]
    assert shown["TTFT (ms)"] == ["100.00"] * 5 + ["3"]
    assert shown["ITL, chunk to chunk (ms)"] == shown["TPOT (ms)"] == ["50.00"] * 5 + ["3"]
    assert shown["mean"] == ["median", "p90", "p99", "max", "samples"]
    assert "Prefix hit rate, y" not in shown
    assert "Queueing in the client (ms)" not in shown


def test_a_late_client_shows() -> None:
    summary = summarize([outcome(), outcome(wait=1.0)], {}, [99])
    shown = rows(table(summary, {}, {}, scheduled=True))
    assert shown["TTFT (ms)"][0] == "100.00"
    assert shown["TTFT from schedule (ms)"][0] == "600.00"
    assert shown["Queueing in the client (ms)"][3] == "1,000.00"
    assert "TTFT from schedule (ms)" not in rows(table(summary, {}, {}, scheduled=False))


def test_failures_show_with_their_reasons() -> None:
    errors = [outcome(error="HTTP 500: oh")] * 3 + [outcome(error=f"other {i}") for i in range(12)]
    text = table(summarize([outcome(), *errors], {}, [99]), {}, {}, scheduled=True)
    assert "3 x HTTP 500: oh" in text
    assert "and 3 other reasons" in text
    assert rows(text)["Failed requests"] == ["15"]


def test_nothing_but_failures() -> None:
    text = table(summarize([outcome(error="gone")], {"ttft": 1}, [99]), {}, {"ttft": 1}, scheduled=True)
    assert "TTFT (ms)" not in text
    assert "1 x gone" in text


def test_runs_side_by_side() -> None:
    told = as_json(summarize([outcome()], {}, [99]))
    text = comparison([{**told, "request_rate": "inf", "max_concurrency": None}, {**told, "request_rate": 2.5}], 99)
    _, first, second = [line.split() for line in text.splitlines()]
    assert first[:3] == ["inf", "-", "0"]
    assert second[0] == "2.5"
    assert first[6:] == ["100.0", "100.0", "50.00", "50.00", "150.0"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((math.inf, None, 1, 4), "the next one as one ends, 4 at a time"),
        ((math.inf, math.inf, 1, None), "all at once"),
        ((2.0, 1.9, 1, 8), "Poisson at 2 req/s (1.900 came out), at most 8 at a time"),
        ((2.0, 1.9, 0.5, None), "gamma of burstiness 0.5 at 2 req/s (1.900 came out)"),
        ((None, 3.4, 1, None), "at the trace's times (3.400 req/s)"),
    ],
)
def test_load_in_words(given: tuple[float | None, float | None, float, int | None], words: str) -> None:
    assert load_words(*given) == words


def test_familiar_flags() -> None:
    line = (
        "--base-url http://h:1 --dataset-name random --random-input-len 5 --random-output-len 6 --num-prompts 7 "
        "--request-rate 1 inf --max-concurrency 2 --goodput ttft:200 tpot:50 --metric-percentiles 50,99.9 --seed 3 "
        "--token-ids 5:9"
    )
    given = options.parser("").parse_args([*line.split(), "--extra-body", '{"top_p": 0.5}', "--no-ignore-eos"])
    assert given.request_rate == [1, math.inf]
    assert dict(given.goodput) == {"ttft": 200, "tpot": 50}
    assert given.metric_percentiles == [50, 99.9]
    assert (given.token_ids, given.extra_body, given.ignore_eos) == ((5, 9), {"top_p": 0.5}, False)


@pytest.mark.parametrize(
    "line",
    [
        "--goodput itl:5",
        "--goodput ttft",
        "--request-rate 0",
        "--request-rate nan",
        "--num-prompts 0",
        "--random-range-ratio 1",
        "--token-ids 9:5",
        "--metric-percentiles 101",
        "--extra-body [1]",
        "--extra-body {",
    ],
)
def test_flags_that_mean_nothing_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options.parser("").parse_args(line.split())
    assert line.split()[0] in capsys.readouterr().err
