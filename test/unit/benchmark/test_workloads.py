"""Workloads and traces."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from serving.prompts import Piece, Source, ideal_hit_rate
from serving.workloads import (
    Request,
    WorkloadError,
    fit,
    random_requests,
    read_trace,
    shared_prefix_requests,
)

ROWS: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 1500, "input_length": 1400, "output_length": 40, "hash_ids": [0, 1, 2]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def request(tokens: int, output: int = 10) -> Request:
    return Request((Piece(Source.UNIQUE, 0, tokens),), output)


def test_random_lengths_are_exact_without_a_range() -> None:
    requests = random_requests(20, 100, 7, 0.0, seed=1)
    assert {(r.input_len, r.output_len) for r in requests} == {(100, 7)}
    assert len({r.prompt for r in requests}) == 20
    assert ideal_hit_rate(r.prompt for r in requests) == 0


def test_random_lengths_lie_in_their_range() -> None:
    requests = random_requests(3000, 100, 10, 0.2, seed=1)
    assert {r.input_len for r in requests} == set(range(80, 121))
    assert {r.output_len for r in requests} == set(range(8, 13))
    assert requests == random_requests(3000, 100, 10, 0.2, seed=1)
    assert requests != random_requests(3000, 100, 10, 0.2, seed=2)


def test_prefixes_are_shared_evenly_and_suffixes_are_not() -> None:
    requests = shared_prefix_requests(12, 3, 100, 20, 5, 0.0, seed=0)
    assert sorted(Counter(r.prompt[0] for r in requests).values()) == [4, 4, 4]
    assert len({r.prompt[1] for r in requests}) == 12
    assert {r.input_len for r in requests} == {120}
    assert ideal_hit_rate(r.prompt for r in requests) == 9 * 100 / (12 * 120)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_read_in_order_of_time(tmp_path: Path, name: str) -> None:
    requests = read_trace(write(tmp_path / name, ROWS), slowdown=2)
    assert [(r.start, r.input_len, r.output_len) for r in requests] == [(0, 1000, 5), (3, 1400, 40), (6, 512, 1)]
    assert requests[1].prompt == tuple(Piece(Source.TRACE, i, n) for i, n in [(0, 512), (1, 512), (2, 376)])


def test_a_scaled_trace_shares_the_same_part(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path / "t.jsonl", ROWS), scale=0.125)
    assert [[p.length for p in r.prompt] for r in requests] == [[64, 61], [64, 64, 47], [64]]
    assert [r.output_len for r in requests] == [1, 5, 1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"hash_ids": [0]}, "1 hash ids do not fit 1000 tokens"),
        ({"input_length": "many"}, "invalid literal"),
        ({"timestamp": None}, "TypeError"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=f"line 2: .*{said}"):
        read_trace(write(tmp_path / "t.jsonl", [ROWS[0], {**ROWS[0], **row}]))


def test_a_missing_trace_tells_the_flag(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="--trace-path"):
        read_trace(tmp_path / "none.jsonl.gz")


def test_what_is_no_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_text("plain")
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(tmp_path / "t.gz")


def test_all_that_fit_stay_without_a_word() -> None:
    assert fit([request(5), request(9)], None, None, "drop") == ([request(5), request(9)], "")
    assert fit([request(5), request(9)], 9, 19, "drop") == ([request(5), request(9)], "")


def test_too_long_ones_are_dropped_with_a_line() -> None:
    kept, line = fit([request(50), request(2000), request(60)], 55, None, "drop")
    assert kept == [request(50)]
    assert line == "Of 3 requests, dropped 2 requests with 2,060 input tokens: the limit is inputs of 55 tokens."


def test_clipping_leaves_room_for_the_output() -> None:
    kept, line = fit([request(50), request(100), request(5, output=80)], 70, 75, "clip")
    assert [(r.input_len, r.output_len) for r in kept] == [(50, 10), (65, 10)]
    assert "dropped 1 requests with 5 input tokens and cut 35 tokens off the prompts of 1:" in line
    assert line.endswith("the limit is inputs of 70 and inputs and outputs of 75 tokens.")
