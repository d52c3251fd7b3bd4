"""Throughput of the offline Engine: many requests at once, random token ids, greedy, going on after end tokens.

    python benchmark/bench_offline.py --requests 1 8 32 --prompt 256 --new 128
    python benchmark/bench_offline.py --requests 16 --prompt 2000 --new 64 --dcp 4 --kv-cache-tokens 65536

Flags that are not listed below are the Engine's, named as the server's. Every repeat has other token ids, so that the
prefix cache finds nothing; the median counts. `out` is new tokens a second over the whole time, `all` counts the
prompts too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dcprt import Engine, SamplingParams
from dcprt.config import build_parser
from dcprt.errors import DcprtError

VOCABULARY = range(1000, 49000)
"""Ordinary tokens of the demo model: no control tokens."""


@dataclass(frozen=True)
class Row:
    """One line of the table; rates are tokens a second."""

    requests: int
    prompt: int
    new: int
    seconds: float
    out: float
    all: float

    @classmethod
    def of(cls, requests: int, prompt: int, new: int, seconds: float) -> Row:
        return cls(requests, prompt, new, seconds, requests * new / seconds, requests * (prompt + new) / seconds)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    out.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="sent at once")
    out.add_argument("--prompt", type=int, nargs="+", default=[256], help="tokens")
    out.add_argument("--new", type=int, nargs="+", default=[128], help="tokens")
    out.add_argument("--repeats", type=int, default=3)
    out.add_argument("--json", type=Path, help="also write the rows to this file")
    return out


def engine_options(argv: Sequence[str]) -> dict[str, Any]:
    """What was asked of the Engine, without what is the default anyway."""
    flags = build_parser("bench_offline.py")
    return {name: value for name, value in vars(flags.parse_args(argv)).items() if value != flags.get_default(name)}


def measure(engine: Engine, requests: int, prompt: int, new: int, repeats: int) -> Row:
    """The median of `repeats`, after one that is short and does not count."""
    found = [seconds(engine, requests, prompt, new if count else min(new, 8), count) for count in range(repeats + 1)]
    return Row.of(requests, prompt, new, statistics.median(found[1:]))


def seconds(engine: Engine, requests: int, prompt: int, new: int, seed: int) -> float:
    chosen = random.Random(f"{requests} {prompt} {new} {seed}")
    prompts = [chosen.choices(VOCABULARY, k=prompt) for _ in range(requests)]
    begin = time.perf_counter()
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), progress=False)
    return time.perf_counter() - begin


def main() -> None:
    options, others = parser().parse_known_args()
    rows: list[Row] = []
    try:
        chosen = engine_options(others)
        begin = time.perf_counter()
        with Engine(**chosen) as engine:
            ready = time.perf_counter() - begin
            print(f"ready in {ready:.1f} s\n")
            print(f"{'requests':>8} {'prompt':>7} {'new':>6} {'seconds':>8} {'out/s':>8} {'all/s':>8}")
            for requests, prompt, new in product(options.requests, options.prompt, options.new):
                row = measure(engine, requests, prompt, new, options.repeats)
                print(f"{requests:8} {prompt:7} {new:6} {row.seconds:8.2f} {row.out:8.1f} {row.all:8.1f}", flush=True)
                rows.append(row)
    except DcprtError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        content = {"ready_s": ready, "engine": chosen, "repeats": options.repeats, "rows": [asdict(r) for r in rows]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
