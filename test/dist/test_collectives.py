"""Collectives between real processes: the same cases for every backend, compared to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dcprt.comm.arena import Arenas, create_arenas

RANK_PROGRAM = Path(__file__).with_name("comm_rank.py")
PACKAGES = Path(__file__).parents[2] / "python"
BACKENDS = [
    pytest.param("shm", marks=pytest.mark.skipif(not find_spec("dcprt_kernel"), reason="no dcprt-kernel")),
    "gloo",
]


@dataclass(frozen=True)
class Case:
    scenario: str
    tp: int
    dcp: int
    options: dict[str, Any] = field(default_factory=dict)
    slot_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What each rank said of one case; None from a rank that died before."""

    told: list[str | None]
    wrong: list[str]


def run(backend: str, cases: list[Case], directory: Path) -> list[Outcome]:
    """Runs the cases one after another in the same processes."""
    arenas = [create_arenas(case.tp, case.dcp, case.slot_bytes) for case in cases]
    jobs = [_job(backend, case, arenas[i], directory / str(i)) for i, case in enumerate(cases)]
    path = os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK_PROGRAM), str(rank), json.dumps(jobs)],
            pass_fds=[fd for one in arenas for fd in one.fds],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(max(case.tp for case in cases))
    ]  # fmt: skip
    for one in arenas:
        one.close()
    outcomes = [_outcome(number, processes[: case.tp]) for number, case in enumerate(cases)]
    for process in processes:
        process.communicate("")
    return outcomes


def _job(backend: str, case: Case, arenas: Arenas, directory: Path) -> dict[str, Any]:
    directory.mkdir()
    return {
        "scenario": case.scenario, "backend": backend, "tp": case.tp, "dcp": case.dcp,
        "options": case.options, "arenas": arenas.to_json(), "directory": str(directory),
    }  # fmt: skip


def _outcome(number: int, processes: list[subprocess.Popen[str]]) -> Outcome:
    """Lets the ranks begin case `number`, all at once, and reads what they tell."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        answers.append(json.loads(line) if line else None)
    return Outcome(
        told=[answer["told"] if answer else None for answer in answers],
        wrong=[answer["told"] for answer in answers if answer and not answer["ok"]],
    )


HEALTHY = {
    "operations 2": Case("operations", 2, 2),
    "operations 3": Case("operations", 3, 3, {"shapes": [[70001]]}),
    "operations 6": Case("operations", 6, 3),
    "one rank per dcp group": Case("operations", 2, 1),
    "larger than the arena": Case("operations", 4, 2, {"shapes": [[5000], [2, 1111]]}, slot_bytes=512),
    "interleaved": Case("interleaved", 4, 2),
    "rounds 4": Case("rounds", 4, 2, {"rounds": 150, "seed": 1, "largest": 20000}),
}
MANY = {
    "rounds 2": Case("rounds", 2, 2, {"rounds": 3000, "seed": 2, "largest": 5000}),
    "rounds 5": Case("rounds", 5, 5, {"rounds": 1000, "seed": 3, "largest": 40000}, slot_bytes=32768),
    "rounds 6": Case("rounds", 6, 2, {"rounds": 2000, "seed": 4, "largest": 3000}, slot_bytes=4096),
}
CALLS = {
    "size": [["all_reduce", 4], ["all_reduce", 5]],
    "operation": [["all_reduce", 4], ["all_gather", 4]],
    "broadcast": [["broadcast", 4], ["all_reduce", 4]],
    "broadcast size": [["broadcast", 4], ["broadcast", 5]],
}
FAULTS = {
    "one absent": Case("absent", 3, 3, {"absent": [1], "op": "all_reduce", "timeout_s": 2}),
    "two absent": Case("absent", 3, 3, {"absent": [1, 2], "op": "all_to_all", "timeout_s": 2}),
    "root absent": Case("absent", 3, 3, {"absent": [0], "op": "broadcast", "timeout_s": 2}),
}
MISMATCHES = {f"mismatch of {what}": Case("mismatch", 3, 3, {"calls": CALLS[what]}) for what in CALLS}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcomes(backend: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = {**HEALTHY, "one absent": FAULTS["one absent"]}
    if backend == "shm":
        cases = {**HEALTHY, **MANY, **FAULTS, **MISMATCHES}
    before = set(Path("/dev/shm").iterdir())
    directory = tmp_path_factory.mktemp(backend)
    found = dict(zip(cases, run(backend, list(cases.values()), directory), strict=True))
    assert set(Path("/dev/shm").iterdir()) <= before
    assert [path for path in directory.rglob("*") if path.is_file()] == []
    return found


@pytest.mark.parametrize("name", [*HEALTHY, *MANY])
def test_results_are_right_to_the_bit(outcomes: dict[str, Outcome], backend: str, name: str) -> None:
    if name in MANY and backend == "gloo":
        pytest.skip("thousands of rounds are for shm")
    assert outcomes[name].wrong == []
    assert None not in outcomes[name].told


@pytest.mark.parametrize("name", FAULTS)
def test_timeout_says_who_is_missing(outcomes: dict[str, Outcome], backend: str, name: str) -> None:
    if name not in outcomes:
        pytest.skip("gloo names nobody: one case is enough")
    outcome, case = outcomes[name], FAULTS[name]
    assert outcome.wrong == []
    gone = case.options["absent"]
    told = [text for rank, text in enumerate(outcome.told) if rank not in gone]
    assert len(told) == case.tp - len(gone)
    for text in told:
        assert text is not None
        assert text.startswith(f"{case.options['op']} of group 'world' in step 17: ")
        if backend == "shm":
            ranks = "rank 1" if gone == [1] else "rank 0" if gone == [0] else "ranks 1, 2"
            assert text.endswith(f"no answer from {ranks} after 2 s")


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_is_an_error_everywhere(outcomes: dict[str, Outcome], backend: str, name: str) -> None:
    if backend == "gloo":
        pytest.skip("gloo does not compare calls")
    assert outcomes[name].wrong == []
    for text in outcomes[name].told:
        assert text is not None
        assert "of group 'world' in step 3: the ranks differ: rank 0 called " in text
        assert f"rank 1 called {MISMATCHES[name].options['calls'][1][0]} of " in text


def test_killed_peer_is_an_error_in_time(backend: str, tmp_path: Path) -> None:
    cases = [Case("interleaved", 3, 3), Case("killed", 3, 3, {"timeout_s": 2})]
    started, outcome = run(backend, cases, tmp_path)
    assert started.wrong == []
    assert outcome.wrong == []
    assert outcome.told[1] is None
    for rank in (0, 2):
        text = outcome.told[rank]
        assert text is not None
        if backend == "shm":
            assert text == "CollectiveTimeout: all_reduce of group 'world': no answer from rank 1 after 2 s"
        else:
            assert text.startswith(("CollectiveError: ", "CollectiveTimeout: "))
