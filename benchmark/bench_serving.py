"""Latency, throughput and goodput of any OpenAI-compatible server; docs/benchmarking.md defines every figure.

    python benchmark/bench_serving.py --port 30000 --random-input-len 1024 --num-prompts 64 --request-rate 1 2 4
    python benchmark/bench_serving.py --dataset-name shared-prefix --max-concurrency 1 8 --goodput ttft:500 tpot:50
    python benchmark/bench_serving.py --dataset-name mooncake --num-prompts 500 --slowdown-factor 10

Exits with 1 if a request failed, and with 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any

import httpx
from tqdm import tqdm  # type: ignore[import-untyped]

from serving import options as flags
from serving.client import Client, Outcome, Shape
from serving.load import run
from serving.measures import as_json, summarize
from serving.prompts import Piece, Source, Vocabulary, ideal_hit_rate
from serving.report import comparison, load_words, table
from serving.schedule import arrivals, offered_rate
from serving.server import Served, ServerError, cache_count, discover, flush, hit_rate
from serving.workloads import Request, WorkloadError, fit, random_requests, read_trace, shared_prefix_requests


@dataclass(frozen=True)
class Point:
    """One run of a sweep. A rate of None is the trace's own times."""

    rate: float | None
    max_concurrency: int | None

    def starts(self, requests: Sequence[Request], burstiness: float, seed: int) -> list[float] | None:
        """When each request is due; None if whenever a place is free."""
        if self.rate is None:
            return [request.start - requests[0].start for request in requests]
        if math.isinf(self.rate) and self.max_concurrency is not None:
            return None
        return arrivals(len(requests), self.rate, burstiness, seed)


@dataclass(frozen=True)
class Target:
    """The server, and how to ask it."""

    http: httpx.AsyncClient
    served: Served
    shape: Shape

    @classmethod
    async def find(cls, http: httpx.AsyncClient, options: argparse.Namespace) -> Target:
        served = await discover(http, options.model)
        chat = options.backend == "openai-chat"
        usage = {"include_usage": True, **({"continuous_usage_stats": True} if options.continuous_usage else {})}
        fields = {"model": served.model, "temperature": options.temperature, "stream_options": usage}
        if options.ignore_eos:
            fields["ignore_eos"] = True
        path = options.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
        shape = Shape(path, chat, options.prompt_format == "text", {**fields, **options.extra_body})
        return cls(http, served, shape)


def workload(options: argparse.Namespace, served: Served) -> tuple[list[Request], str]:
    """The requests of every run, and a line about those that were too long."""
    count, seed, ratio = options.num_prompts, options.seed, options.random_range_ratio
    if options.dataset_name == "random":
        requests = random_requests(count, options.random_input_len, options.random_output_len, ratio, seed)
    elif options.dataset_name == "shared-prefix":
        lengths = options.prefix_len, options.suffix_len, options.random_output_len
        requests = shared_prefix_requests(count, options.num_prefixes, *lengths, ratio, seed)
    else:
        requests = read_trace(options.trace_path, options.length_scale, options.slowdown_factor)
    kept, line = fit(requests, options.max_input_len, served.max_len, options.over_length)
    if not kept:
        raise WorkloadError(line or "The workload has no requests.")
    return kept[:count], line


def vocabulary(options: argparse.Namespace, served: Served) -> Vocabulary:
    """The range of the flag, or the usual one as far as the server's vocabulary goes."""
    low, high = options.token_ids or flags.DEFAULT_IDS
    if options.token_ids is None and served.vocab_size is not None and served.vocab_size < high:
        low, high = served.vocab_size // 8, served.vocab_size - served.vocab_size // 8
    return Vocabulary(low, high, options.seed)


def points(options: argparse.Namespace) -> list[Point]:
    """All rates with all concurrencies."""
    default = None if options.dataset_name == "mooncake" else math.inf
    return [Point(*pair) for pair in product(options.request_rate or [default], options.max_concurrency or [None])]


async def warm_up(target: Target, options: argparse.Namespace, words: Vocabulary, like: Request) -> None:
    """Requests that are not measured, one after the other, with tokens of their own.

    Raises:
        ServerError: one failed.
    """
    client = Client(target.http, target.shape.path, options.request_timeout)
    for i in range(options.num_warmups):
        outcome = Outcome(0)
        prompt = (Piece(Source.WARMUP, i, like.input_len),)
        await client.send(target.shape.body(prompt, like.output_len, words), outcome)
        if outcome.error:
            raise ServerError(f"The warm-up failed: {outcome.error}")


async def measure(
    target: Target, options: argparse.Namespace, words: Vocabulary, requests: list[Request], point: Point
) -> dict[str, Any]:
    """One run: prints its table, and returns it as JSON."""
    starts = point.starts(requests, options.burstiness, options.seed)
    offered = None if starts is None else offered_rate(starts)
    print(f"\n{len(requests):,} requests, {load_words(point.rate, offered, options.burstiness, point.max_concurrency)}")
    if options.flush_cache:
        await flush(target.http)
    before = await cache_count(target.http) if target.served.is_dcprt else None
    with tqdm(total=len(requests), disable=options.disable_tqdm, unit="request", leave=False) as bar:

        def ended(outcome: Outcome) -> None:
            bar.update()
            if outcome.error:
                bar.set_postfix_str("with failures")

        client = Client(target.http, target.shape.path, options.request_timeout)
        outcomes = await run(client, target.shape, words, requests, starts, point.max_concurrency, ended)
    after = await cache_count(target.http) if target.served.is_dcprt else None
    slo = dict(options.goodput)
    summary = summarize(outcomes, slo, options.metric_percentiles)
    caches = {
        "of an ideal cache": ideal_hit_rate(request.prompt for request in requests),
        "by usage": None if summary.cached_tokens is None else summary.cached_tokens / max(summary.input_tokens, 1),
        "by /metrics": hit_rate(before, after) if before and after else None,
    }
    print(table(summary, caches, slo, scheduled=starts is not None))
    found: dict[str, Any] = {
        "num_prompts": len(requests),
        "request_rate": "trace" if point.rate is None else str(point.rate) if math.isinf(point.rate) else point.rate,
        "offered_rate": None if offered is None or math.isinf(offered) else offered,
        "burstiness": options.burstiness,
        "max_concurrency": point.max_concurrency,
        "goodput_limits_ms": slo,
        "prefix_hit_rates": caches,
        **as_json(summary),
    }
    return {**found, "requests": [asdict(o) for o in outcomes]} if options.output_details else found


async def bench(options: argparse.Namespace) -> int:
    """All runs; the exit status."""
    url = (options.base_url or f"http://{options.host}:{options.port}").rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False) as http:
        target = await Target.find(http, options)
        requests, line = workload(options, target.served)
        words = vocabulary(options, target.served)
        print(f"{target.served.model} at {url}{target.shape.path}, {options.dataset_name}")
        if line:
            print(line)
        await warm_up(target, options, words, requests[0])
        runs = []
        for number, point in enumerate(points(options)):
            # prompts of its own, so that none finds those of the run before in a cache
            runs.append(await measure(target, options, replace(words, seed=words.seed + number), requests, point))
    if len(runs) > 1:
        print("\n" + comparison(runs, options.metric_percentiles[-1]))
    if options.output_file:
        head = {"date": datetime.now(UTC).isoformat(), "model_id": target.served.model, "base_url": url, "note": line}
        told = {name: value for name, value in vars(options).items() if name != "api_key"}
        text = json.dumps({**head, "options": told, "runs": runs}, default=str, indent=1)
        options.output_file.write_text(text + "\n")
    return 1 if any(one["failed"] for one in runs) else 0


def main() -> int:
    options = flags.parser(__doc__ or "").parse_args()
    try:
        return asyncio.run(bench(options))
    except (ServerError, WorkloadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing is reported of the run that was under way", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
