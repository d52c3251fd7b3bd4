"""`benchmark/bench_serving.py` against a real server: every token and every hit is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .server import Server

SCRIPT = Path(__file__).parents[2] / "benchmark" / "bench_serving.py"
TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 10, "input_length": 1300, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 20, "input_length": 600, "output_length": 2, "hash_ids": [9, 10]},
    {"timestamp": 30, "input_length": 9000, "output_length": 2, "hash_ids": list(range(20, 38))},
]


def bench(server: Server, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--base-url", server.url, "--disable-tqdm", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def figures(server: Server, path: Path, *flags: str) -> tuple[list[dict[str, Any]], str]:
    """The runs in the file, and what was printed."""
    result = bench(server, "--output-file", str(path), *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text())["runs"], result.stdout


def test_rates_of_random_prompts(tiny: Server, tmp_path: Path) -> None:
    lengths = ("--random-input-len", "40", "--random-output-len", "6", "--num-prompts", "5", "--seed", "11")
    load = ("--request-rate", "50", "inf", "--goodput", "ttft:60000", "tpot:60000", "--output-details")
    runs, text = figures(tiny, tmp_path / "out.json", *lengths, *load)
    assert [run["request_rate"] for run in runs] == [50, "inf"]
    for run in runs:
        assert (run["completed"], run["failed"]) == (5, 0)
        assert (run["total_input_tokens"], run["total_output_tokens"]) == (200, 30)
        assert run["other_output_length"] == run["other_input_length"] == 0
        assert run["request_goodput"] == run["request_throughput"] > 0
        assert run["prefix_hit_rates"] == {"of an ideal cache": 0, "by usage": 0, "by /metrics": 0}
        assert 0 < run["mean_ttft_ms"] <= run["mean_e2el_ms"]
        assert {request["asked_output"] for request in run["requests"]} == {6}
    assert text.count("Successful requests") == 2


def test_shared_prefixes_are_found_token_by_token(tiny: Server, tmp_path: Path) -> None:
    lengths = ("--prefix-len", "101", "--suffix-len", "13", "--random-output-len", "3", "--num-prompts", "6")
    flags = ("--dataset-name", "shared-prefix", "--num-prefixes", "2", "--max-concurrency", "1", "--flush-cache")
    (run,), text = figures(tiny, tmp_path / "out.json", *lengths, *flags)
    rate = pytest.approx(4 * 101 / (6 * 114))
    assert run["prefix_hit_rates"] == {"of an ideal cache": rate, "by usage": rate, "by /metrics": rate}
    assert run["peak_concurrency"] == 1
    assert "59.1%" in text


def test_a_trace_and_what_does_not_fit(tiny: Server, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    flags = ("--dataset-name", "mooncake", "--trace-path", str(trace), "--max-concurrency", "1", "--flush-cache")
    (run,), text = figures(tiny, tmp_path / "out.json", *flags)
    assert "Of 4 requests, dropped 1 requests with 9,000 input tokens" in text
    assert (run["completed"], run["total_input_tokens"], run["total_output_tokens"]) == (3, 3000, 9)
    assert run["request_rate"] == "trace"
    rate = pytest.approx(1024 / 3000)
    assert run["prefix_hit_rates"] == {"of an ideal cache": rate, "by usage": rate, "by /metrics": rate}


def test_chats_in_words(tiny: Server, tmp_path: Path) -> None:
    lengths = ("--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "2")
    (run,), _ = figures(tiny, tmp_path / "out.json", "--backend", "openai-chat", *lengths)
    assert (run["completed"], run["total_output_tokens"]) == (2, 8)
    assert run["total_input_tokens"] >= 40


def test_failures_are_counted_and_shown(tiny: Server) -> None:
    flags = ("--num-prompts", "3", "--random-input-len", "8", "--extra-body", '{"temperature": -1}')
    result = bench(tiny, *flags, "--num-warmups", "0")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Failed requests                              3" in result.stdout
    assert "3 x HTTP 4" in result.stdout
    result = bench(tiny, *flags)
    assert result.returncode == 2
    assert "The warm-up failed: HTTP 4" in result.stderr


def test_what_cannot_be_measured(tiny: Server, tmp_path: Path) -> None:
    assert "--trace-path" in bench(tiny, "--dataset-name", "mooncake", "--trace-path", str(tmp_path / "no")).stderr
    result = bench(tiny, "--random-input-len", "9000", "--num-prompts", "2")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "dropped 2 requests" in result.stderr
    result = bench(tiny, "--base-url", "http://127.0.0.1:9")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
