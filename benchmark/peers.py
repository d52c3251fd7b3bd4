"""dcprt beside llama.cpp, vLLM and transformers: the same model, token ids and threads, one system at a time.

    python benchmark/peers.py
    python benchmark/peers.py --only dcprt,llama --workloads a,d --repeats 5

Every peer is installed into a virtual environment of its own; one that cannot be is reported. Weights and KV are
bfloat16, decoding is greedy and goes on after end tokens, no KV is reused between requests, nothing is speculated.

    a  decode: tokens a second after the first one, one request
    b  offline: new tokens a second of all requests together, from the first prompt on
    c  prefill: prompt tokens a second until the first new token
    d  like a, after a long prompt

Each figure is the median of the repeats, every one with other token ids. `start` is from the start of the process to
its first new token, on a warm disk; `memory` is the peak of all processes of a system together (PSS). Leave the
machine alone while this runs: all figures change with what else it does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from systems.install import NotInstalled, ensure, tcmalloc
from systems.protocol import WORKLOADS, Job
from systems.watch import MemoryWatch

HERE = Path(__file__).resolve().parent
TITLES = {"dcprt": "dcprt", "llama": "llama.cpp", "vllm": "vLLM", "transformers": "transformers"}
MODELS = {"dcprt": "hf", "llama": "model.gguf", "vllm": "hf", "transformers": "hf"}
TARGETS = {"a": 1.4, "b": 1.25, "c": 1.1, "d": 2.0}
"""Times the best peer that dcprt is meant to reach."""

MOST_START_S, MOST_MIB = 6.0, 1.2 * 1024
"""What dcprt's start and memory are meant to stay below."""


@dataclass
class Outcome:
    """What was found about one system."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    start_s: list[float] = field(default_factory=list)
    peak_mib: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    read_gb_s: float | None = None
    error: str | None = None

    def median(self, workload: str) -> float | None:
        rates = self.rates.get(workload)
        return statistics.median(rates) if rates else None


class Failed(Exception):
    """A system ended before it was done; the text is the end of its log."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--only", type=_names(TITLES), default=list(TITLES), help="systems, with commas between them")
    out.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS), help="like a,d; default all")
    out.add_argument("--repeats", type=int, default=3, help="of each workload")
    out.add_argument("--starts", type=int, default=2, help="times each system is started to time it; 0 leaves it out")
    out.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="and cores, for each system")
    out.add_argument("--venvs", type=Path, default=_cache(), help="where environments and converted models are kept")
    out.add_argument("--pip-args", type=shlex.split, default=[], help="for every pip install of a peer")
    out.add_argument("--timeout", type=float, default=1800, help="seconds that one system may take")
    out.add_argument("--json", type=Path, help="default: benchmark/results/peers-<date>.json")
    return out


def _names(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return [name for name in known if name in chosen]

    return names


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcprt" / "peers"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """What a system's documentation advises, and nothing that reaches for the network."""
    base, threads = options.venvs, options.threads
    found = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if name == "vllm":
        preloaded = [tcmalloc(base), next((base / "vllm").glob("lib/libiomp5.so"), None)]
        cores = sorted(os.sched_getaffinity(0))
        found |= {
            "LD_PRELOAD": ":".join(str(path) for path in preloaded if path),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": str(base / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(base / "vllm-cache" / "inductor"),
        }
    return found


@contextmanager
def running(name: str, python: Path, job: Job, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """One system at work; ended with all its processes if it takes too long, or when the driver is interrupted."""
    log = options.venvs / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), str(HERE / "systems" / f"run_{name}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(name, options),
            start_new_session=True,
        )
    timer = threading.Timer(options.timeout, os.killpg, (process.pid, 9))
    timer.start()
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.close()
        yield process
        if process.wait():
            raise Failed("\n".join(log.read_text().strip().splitlines()[-8:]) or f"exit status {process.returncode}")
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def measure(name: str, python: Path, job: Job, options: argparse.Namespace, outcome: Outcome) -> None:
    """Run all workloads in one process."""
    with running(name, python, job, options) as process:
        watch = MemoryWatch(process.pid)
        for event in events(process):
            if event["event"] == "loaded":
                outcome.versions = event["versions"]
            elif event["event"] == "timed":
                watch.calm = event["on"]
            elif event["event"] == "rate":
                outcome.rates.setdefault(event["workload"], []).append(event["rate"])
                outcome.tokens.setdefault(event["workload"], event["tokens"])
                say(f"{name} {event['workload']} {event['rate']:.1f} tok/s")
        outcome.peak_mib = watch.stop()


def time_start(name: str, python: Path, job: Job, options: argparse.Namespace, outcome: Outcome) -> None:
    begin = time.monotonic()
    with running(name, python, job, options) as process:
        for event in events(process):
            if event["event"] == "first_token":
                outcome.start_s.append(time.monotonic() - begin)
                say(f"{name} start {outcome.start_s[-1]:.1f} s")


def examine(name: str, options: argparse.Namespace) -> Outcome:
    """Everything about one system; what goes wrong becomes part of the outcome."""
    outcome = Outcome()
    model = str(options.venvs / "models" / MODELS[name])
    try:
        python = Path(sys.executable) if name == "dcprt" else ensure(name, options.venvs, options.pip_args, say)
        outcome.read_gb_s = read_bandwidth(options.threads)
        work = Job(model, options.threads, start=False, workloads=options.workloads, repeats=options.repeats)
        measure(name, python, work, options, outcome)
        for _ in range(options.starts):
            time_start(name, python, Job(model, options.threads, start=True), options, outcome)
    except NotInstalled as error:
        outcome.error = f"not installed: {error}"
    except Failed as error:
        outcome.error = str(error)
    return outcome


def read_bandwidth(threads: int) -> float:
    command = [sys.executable, str(HERE / "systems" / "bandwidth.py"), str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def alike(found: list[int], reference: list[int]) -> int:
    """Number of first tokens that are the same."""
    pairs = zip(found, reference, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(found), len(reference)))


def cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def verdict(value: float | None, limit: float, met: bool) -> list[str]:
    return ["", "", ""] if value is None else ["", f"{limit:g}", "met" if met else "missed"]


def table(outcomes: dict[str, Outcome], workloads: list[str]) -> list[list[str]]:
    """Rows of cells, the header first; the last columns hold dcprt against the best peer."""
    own = outcomes.get("dcprt", Outcome())
    rows = [["", "unit", *(TITLES[name] for name in outcomes), "ratio", "target", ""]]
    for key in workloads:
        medians = {name: outcome.median(key) for name, outcome in outcomes.items()}
        best = max((rate for name, rate in medians.items() if name != "dcprt" and rate), default=None)
        mine, end = medians.get("dcprt"), ["", "", ""]
        if mine and best:
            met = mine >= TARGETS[key] * best
            end = [f"{mine / best:.2f}", f"{TARGETS[key]:g}", "met" if met else "missed"]
        rows.append([f"{key}  {WORKLOADS[key].title}", "tok/s", *map(cell, medians.values()), *end])
    starts = {name: statistics.median(o.start_s) if o.start_s else None for name, o in outcomes.items()}
    mine = starts.get("dcprt")
    rows.append(["start to first token", "s", *map(cell, starts.values()),
                 *verdict(mine, MOST_START_S, (mine or 0) <= MOST_START_S)])  # fmt: skip
    memory = [cell(outcome.peak_mib, 0) for outcome in outcomes.values()]
    rows.append(["peak memory", "MiB", *memory, *verdict(own.peak_mib, MOST_MIB, (own.peak_mib or 0) <= MOST_MIB)])
    for key in workloads:
        if reference := own.tokens.get(key):
            counts = [str(alike(o.tokens[key], reference)) if key in o.tokens else "-" for o in outcomes.values()]
            rows.append([f"{key}  first tokens as dcprt's", f"of {len(reference)}", *counts, "", "", ""])
    reads = [cell(outcome.read_gb_s) for outcome in outcomes.values()]
    rows.append(["machine: reading memory, before each", "GB/s", *reads, "", "", ""])
    return rows


def show(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = (text.ljust(width) if i < 2 else text.rjust(width)
                          for i, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def report(outcomes: dict[str, Outcome], options: argparse.Namespace, loads: list[float]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor(),
        "threads": options.threads,
        "repeats": options.repeats,
        "load_average": loads,
        "workloads": {key: asdict(WORKLOADS[key]) for key in options.workloads},
        "targets": {**TARGETS, "start_s": MOST_START_S, "peak_mib": MOST_MIB},
        "systems": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }


def main() -> None:
    options = parser().parse_args()
    options.venvs = options.venvs.expanduser().resolve()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    subprocess.run([sys.executable, str(HERE / "systems" / "convert.py"), str(options.venvs / "models")], check=True)
    outcomes: dict[str, Outcome] = {}
    loads = [os.getloadavg()[0]]
    for name in options.only:
        outcomes[name] = examine(name, options)
        loads.append(os.getloadavg()[0])
    print(show(table(outcomes, options.workloads)))
    print(f"\n{processor()}, {options.threads} threads; load average {min(loads):.1f} to {max(loads):.1f}")
    for name, outcome in outcomes.items():
        print(f"{TITLES[name]}: {', '.join(f'{key} {value}' for key, value in outcome.versions.items())}")
        if outcome.error:
            print(f"{TITLES[name]} FAILED: {outcome.error}")
    path = options.json or HERE / "results" / f"peers-{datetime.date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report(outcomes, options, loads), indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
