"""Flags, named as in `vllm bench serve`, with SGLang's names for the same beside them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from serving.measures import SLO_NAMES

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
DEFAULT_IDS = 1000, 30000
"""In the usual vocabularies, which begin or end with their special tokens, these are ordinary ones."""


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def above_zero(text: str) -> float:
    """A number greater than 0; `inf` is one."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return number


def ratio(text: str) -> float:
    """From 0 to less than 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to less than 1")
    return number


def percent(text: str) -> list[float]:
    """Numbers from 0 to 100 with commas between them."""
    numbers = [float(part) for part in text.split(",")]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text} has one that is not from 0 to 100")
    return numbers


def limit(text: str) -> tuple[str, float]:
    """`ttft:200`: a name of a latency and milliseconds."""
    name, _, value = text.partition(":")
    if name not in SLO_NAMES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SLO_NAMES)}")
    return name, above_zero(value)


def id_range(text: str) -> tuple[int, int]:
    """`1000:30000`: token ids from the first up to, not including, the second."""
    low, _, high = text.partition(":")
    if not 0 <= int(low) < int(high):
        raise argparse.ArgumentTypeError(f"{text} is not LOW:HIGH")
    return int(low), int(high)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return found


def parser(description: str) -> argparse.ArgumentParser:
    """All flags."""
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _server_flags(out.add_argument_group("server"))
    _request_flags(out.add_argument_group("requests"))
    _workload_flags(out.add_argument_group("workload"))
    _trace_flags(out.add_argument_group("trace"))
    _load_flags(out.add_argument_group("load"))
    _result_flags(out.add_argument_group("results"))
    return out


def _server_flags(group: Any) -> None:
    group.add_argument("--base-url", help="http://HOST:PORT, in place of the next two")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=30000)
    group.add_argument("--endpoint", help="path; default: /v1/completions, or /v1/chat/completions for openai-chat")
    group.add_argument("--backend", choices=("openai", "openai-chat"), default="openai")
    group.add_argument("--model", help="default: the one that the server has")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")


def _request_flags(group: Any) -> None:
    boolean = argparse.BooleanOptionalAction
    group.add_argument("--prompt-format", choices=("ids", "text"), default="ids", help="text: about a token a word")
    group.add_argument(
        "--token-ids", type=id_range, metavar="LOW:HIGH", help="range of random ids; default: 1000:30000"
    )
    group.add_argument("--ignore-eos", action=boolean, default=True, help="so that outputs are as long as asked")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--extra-body", "--extra-request-body", type=json_object, default={}, metavar="JSON")
    group.add_argument(
        "--continuous-usage",
        action="store_true",
        help="ask for token counts with every chunk (vLLM), for ITL per token",
    )
    group.add_argument("--request-timeout", type=above_zero, default=3600.0, metavar="SECONDS")


def _workload_flags(group: Any) -> None:
    group.add_argument("--dataset-name", choices=("random", "shared-prefix", "mooncake"), default="random")
    group.add_argument("--num-prompts", type=positive, default=1000, help="requests of a run; of a trace, the first")
    group.add_argument("--seed", type=int, default=0, help="of tokens, lengths and arrivals")
    group.add_argument("--random-input-len", "--input-len", type=positive, default=1024)
    group.add_argument("--random-output-len", "--output-len", type=positive, default=128)
    group.add_argument(
        "--random-range-ratio", type=ratio, default=0.0, help="lengths from (1 - R) to (1 + R) times those given"
    )
    group.add_argument("--num-prefixes", "--gsp-num-groups", type=positive, default=8, help="of shared-prefix")
    group.add_argument("--prefix-len", "--gsp-system-prompt-len", type=positive, default=2048)
    group.add_argument("--suffix-len", "--gsp-question-len", type=positive, default=128, help="what is not shared")
    group.add_argument("--max-input-len", type=positive, help="longest prompt; the server's own limit holds as well")
    group.add_argument(
        "--over-length", choices=("drop", "clip"), default="drop", help="what becomes of requests that are too long"
    )


def _trace_flags(group: Any) -> None:
    group.add_argument(
        "--trace-path",
        "--dataset-path",
        type=Path,
        default=TRACES / "mooncake_conversation.jsonl.gz",
        help="trace of mooncake, .jsonl or .jsonl.gz; default: %(default)s",
    )
    group.add_argument(
        "--slowdown-factor", "--mooncake-slowdown-factor", type=above_zero, default=1.0, help="times the trace's times"
    )
    group.add_argument("--length-scale", type=above_zero, default=1.0, help="times the trace's lengths and blocks")


def _load_flags(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=above_zero,
        nargs="+",
        metavar="RATE",
        help="requests a second, or inf; several: a run of each. Default: inf, or the times of the trace",
    )
    group.add_argument("--burstiness", type=above_zero, default=1.0, help="shape of the gaps' gamma; 1: Poisson")
    group.add_argument("--max-concurrency", type=positive, nargs="+", metavar="N", help="several: a run of each")
    group.add_argument("--num-warmups", "--warmup-requests", type=int, default=1)
    group.add_argument("--flush-cache", action="store_true", help="empty the prefix cache before each run")


def _result_flags(group: Any) -> None:
    group.add_argument("--goodput", type=limit, nargs="+", default=[], metavar="NAME:MS", help="ttft, tpot, e2el")
    group.add_argument("--metric-percentiles", "--percentiles", type=percent, default=[99.0], metavar="P,P")
    group.add_argument("--output-file", type=Path, help="JSON of all runs")
    group.add_argument("--output-details", "--save-detailed", action="store_true", help="every request, in that file")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
