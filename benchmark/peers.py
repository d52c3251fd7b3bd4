"""dcprt beside llama.cpp, vLLM and transformers: the same model, token ids and threads, one system at a time.

    python benchmark/peers.py
    python benchmark/peers.py --only dcprt,llama --workloads a,d --repeats 5

Every peer is installed into a virtual environment of its own; one that cannot be is reported. Weights and KV are
bfloat16, decoding is greedy and goes on after end tokens, no KV is reused between requests, nothing is speculated.

    a  decode: tokens a second after the first one, one request
    b  offline: new tokens a second of all requests together, from the first prompt on
    c  prefill: prompt tokens a second until the first new token
    d  like a, after a long prompt

All systems take their turn in each round, since a shared machine changes its speed; every round has its own token ids.
A figure is the median of the rounds that nothing disturbed: in which other processes used less than a tenth of a core
while it was timed. A * says that there was none. `start` is from the start of the process to its first new token, on a
warm disk; `peak memory` is that of all processes of a system together (PSS). Leave the machine alone while this runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from systems.install import NotInstalled, ensure, tcmalloc
from systems.protocol import WORKLOADS, Job
from systems.watch import Watch

HERE = Path(__file__).resolve().parent
TITLES = {"dcprt": "dcprt", "llama": "llama.cpp", "vllm": "vLLM", "transformers": "transformers"}
MODELS = {"dcprt": "hf", "llama": "model.gguf", "vllm": "hf", "transformers": "hf"}
TARGETS = {"a": 1.4, "b": 1.25, "c": 1.1, "d": 2.0}
"""Times the best peer that dcprt is meant to reach."""

MOST_START_S, MOST_MIB = 6.0, 1.2 * 1024
"""What dcprt's start and memory are meant to stay below."""


MOST_OTHERS = 0.1
"""Cores that others may use while something is timed; what was timed with more counts only where there is no other."""


@dataclass(frozen=True)
class Figure:
    """One timing, and how many cores others used meanwhile."""

    value: float
    others: float

    @property
    def calm(self) -> bool:
        return self.others <= MOST_OTHERS

    def __str__(self) -> str:
        return f"{self.value:.1f} (others used {self.others:.2f} cores)"


@dataclass
class Outcome:
    """What was found about one system."""

    rates: dict[str, list[Figure]] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    start_s: list[Figure] = field(default_factory=list)
    peak_mib: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None

    @property
    def figures(self) -> list[Figure]:
        return [figure for figures in self.rates.values() for figure in figures] + self.start_s

    def median(self, workload: str) -> float | None:
        return middle(self.rates.get(workload, []))


def middle(figures: list[Figure]) -> float | None:
    """The median of those that nobody disturbed, else of all."""
    chosen = [figure.value for figure in figures if figure.calm] or [figure.value for figure in figures]
    return statistics.median(chosen) if chosen else None


class Failed(Exception):
    """A system ended before it was done; the text is the end of its log."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--only", type=_names(TITLES), default=list(TITLES), help="systems, with commas between them")
    out.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS), help="like a,d; default all")
    out.add_argument("--repeats", type=int, default=3, help="rounds, in each of which all systems take their turn")
    out.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="and cores, for each system")
    out.add_argument("--venvs", type=Path, default=_cache(), help="where environments and converted models are kept")
    out.add_argument("--pip-args", type=shlex.split, default=[], help="for every pip install of a peer")
    out.add_argument("--timeout", type=float, default=1800, help="seconds that one system may take in a round")
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
    found = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return found | vllm_environment(options.venvs) if name == "vllm" else found


def vllm_environment(base: Path) -> dict[str, str]:
    """Allocator and OpenMP preloaded, all cores computing, and what it compiled before found again.

    All in one process: in one run each, beside other work, that decoded at 49 tokens a second and three processes that
    share the cores at 37. vLLM sets the variables of OpenMP itself, but not in one process; and left alone it keeps one
    core of two for its scheduler.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    preloaded = [tcmalloc(base), next((base / "vllm").glob("lib/libiomp5.so"), None)]
    return {
        "LD_PRELOAD": ":".join(str(path) for path in preloaded if path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(base / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(base / "vllm-cache" / "inductor"),
    }


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
        with suppress(BrokenPipeError):
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
    """One round of a system, in a process of its own."""
    begin = time.monotonic()
    with running(name, python, job, options) as process:
        watch, others = Watch(process.pid), 0.0
        for event in events(process):
            if event["event"] == "first_token":
                outcome.start_s.append(Figure(time.monotonic() - begin, watch.end()))
                outcome.versions = event["versions"]
                say(f"  {name} starts in {outcome.start_s[-1]}")
            elif event["event"] == "begin":
                watch.begin()
            elif event["event"] == "end":
                others = watch.end()
            elif event["event"] == "rate":
                figure = Figure(event["rate"], others)
                outcome.rates.setdefault(event["workload"], []).append(figure)
                outcome.tokens.setdefault(event["workload"], []).append(event["tokens"])
                say(f"  {name} {event['workload']} {figure}")
        watch.stop()
    outcome.peak_mib = max(outcome.peak_mib or 0.0, watch.peak_mib)


def examine(name: str, round_: int, options: argparse.Namespace, outcome: Outcome) -> None:
    """One round of a system; what goes wrong becomes part of the outcome."""
    try:
        python = Path(sys.executable) if name == "dcprt" else ensure(name, options.venvs, options.pip_args, say)
        outcome.machine.append(machine(options.threads))
        job = Job(str(options.venvs / "models" / MODELS[name]), options.threads, options.workloads, round_)
        measure(name, python, job, options, outcome)
    except NotInstalled as error:
        outcome.error = f"not installed: {error}"
    except Failed as error:
        outcome.error = str(error)


def machine(threads: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "systems" / "machine.py"), str(threads)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def alike(found: list[list[int]], reference: list[list[int]]) -> int:
    """Number of first tokens that are the same, over all rounds."""
    pairs = (zip(*pair, strict=False) for pair in zip(found, reference, strict=False))
    return sum(sum(1 for _ in takewhile(lambda both: both[0] == both[1], pair)) for pair in pairs)


def cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def typical(machine: list[dict[str, float]], what: str) -> float | None:
    return statistics.median(found[what] for found in machine) if machine else None


def shown(figures: list[Figure]) -> str:
    return cell(middle(figures)) + ("*" if figures and not any(figure.calm for figure in figures) else "")


def table(outcomes: dict[str, Outcome], workloads: list[str]) -> list[list[str]]:
    """Rows of cells, the header first; the last columns hold dcprt against the best peer."""
    own, every = outcomes.get("dcprt", Outcome()), list(outcomes.values())
    rows = [["", "unit", *(TITLES[name] for name in outcomes), "ratio", "target", ""]]

    def add(title: str, unit: str, cells: Iterable[str], end: Sequence[str] = ("", "", "")) -> None:
        rows.append([title, unit, *cells, *end])

    for key in workloads:
        add(
            f"{key}  {WORKLOADS[key].title}",
            "tok/s",
            (shown(o.rates.get(key, [])) for o in every),
            ratio(outcomes, key),
        )
    add("start to first token", "s", (shown(o.start_s) for o in every), below(middle(own.start_s), MOST_START_S))
    add("peak memory", "MiB", (cell(o.peak_mib, 0) for o in every), below(own.peak_mib, MOST_MIB))
    for key in workloads:
        if reference := own.tokens.get(key):
            counts = [str(alike(o.tokens.get(key, []), reference)) for o in every]
            add(f"{key}  first tokens as dcprt's", f"of {sum(map(len, reference))}", counts)
    for what, unit in (("read_gb_s", "GB/s"), ("bf16_gflops", "GFLOP/s")):
        add("machine, before each", unit, (cell(typical(o.machine, what), 0) for o in every))
    add("disturbed", "timings", (f"{sum(not f.calm for f in o.figures)} of {len(o.figures)}" for o in every))
    return rows


def ratio(outcomes: dict[str, Outcome], workload: str) -> list[str]:
    """dcprt's rate to that of the best peer, and whether that is enough."""
    medians = {name: outcome.median(workload) or 0.0 for name, outcome in outcomes.items()}
    own, best = medians.pop("dcprt", 0.0), max(medians.values(), default=0.0)
    if not own or not best:
        return ["", "", ""]
    return [f"{own / best:.2f}", f"{TARGETS[workload]:g}", "met" if own >= TARGETS[workload] * best else "missed"]


def below(value: float | None, limit: float) -> list[str]:
    return ["", "", ""] if value is None else ["", f"{limit:.0f}", "met" if value <= limit else "missed"]


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
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.default_int_handler)
    outcomes = {name: Outcome() for name in options.only}
    loads = [os.getloadavg()[0]]
    try:
        for number in range(options.repeats):
            say(f"round {number + 1} of {options.repeats}")
            for name in options.only:
                if outcomes[name].error is None:
                    examine(name, number, options, outcomes[name])
                    loads.append(os.getloadavg()[0])
    except KeyboardInterrupt:
        say("interrupted; this is what was measured so far")
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
