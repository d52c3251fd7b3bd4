"""`--profile-steps`: a Chrome trace of all ranks and the scheduler."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dcprt import Engine, SamplingParams

from .server import Server
from .tiny import LAYERS
from .tiny import flags as tiny_flags

Event = dict[str, Any]
SLACK = 1e-2
"""Microseconds by which rounding may move the end of a span."""
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def engine(model: Path, out: Path | None, **options: Any) -> Engine:
    shape = {"dtype": "float32", "load_format": "dummy", "kv_cache_tokens": 4096, "chunked_prefill_size": 32}
    profile = None if out is None else str(out)
    return Engine(model=str(model), skip_tokenizer_init=True, profile_steps=profile, **shape, **options)


def tracks(out: Path) -> dict[int, list[Event]]:
    """The complete events of each process, in the order of their begin."""
    events: list[Event] = json.loads(out.read_text())["traceEvents"]
    found: dict[int, list[Event]] = {event["pid"]: [] for event in events}
    for event in events:
        if event["ph"] == "X":
            found[event["pid"]].append(event)
    for track in found.values():
        assert [e["ts"] for e in track] == sorted(e["ts"] for e in track)
    return found


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def parents(track: list[Event]) -> list[int | None]:
    """The index of the span around each; fails where two overlap without one holding the other."""
    open_spans: list[int] = []
    found: list[int | None] = []
    for index, event in enumerate(track):
        while open_spans and end(track[open_spans[-1]]) <= event["ts"] + SLACK:
            open_spans.pop()
        assert not open_spans or end(event) <= end(track[open_spans[-1]]) + SLACK, (event, track[open_spans[-1]])
        found.append(open_spans[-1] if open_spans else None)
        open_spans.append(index)
    return found


def inside(track: list[Event], name: str) -> set[str]:
    """Names of the spans right inside those called `name`."""
    around = parents(track)
    return {e["name"] for e, p in zip(track, around, strict=True) if p is not None and track[p]["name"] == name}


def check_sums(track: list[Event]) -> None:
    """The parts of a span never take longer than it does."""
    sums: dict[int, float] = {}
    for event, parent in zip(track, parents(track), strict=True):
        if parent is not None:
            sums[parent] = sums.get(parent, 0) + event["dur"]
    for index, total in sums.items():
        assert total <= track[index]["dur"] + SLACK * len(track)


def names(track: list[Event]) -> set[str]:
    return {event["name"] for event in track}


def test_all_ranks_are_in_the_trace(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    with engine(tiny_model, out, dcp=2) as running:
        outputs = running.generate(PROMPTS, GREEDY)
    found = tracks(out)
    assert sorted(found) == [0, 1, 2]
    for track in found.values():
        check_sums(track)
    numbers = [[e["args"]["number"] for e in found[rank] if e["name"] == "step"] for rank in (0, 1)]
    assert numbers[0] == list(range(1, len(numbers[0]) + 1))
    assert len(numbers[0]) >= 8
    assert abs(len(numbers[0]) - len(numbers[1])) <= 1
    for rank in (0, 1):
        track = found[rank]
        assert inside(track, "step") >= {"prepare", "forward", "logits", "sample"}
        assert inside(track, "forward") >= {f"layer {i}" for i in range(LAYERS)}
        assert inside(track, "layer 0") >= {"attention: new tokens", "attention: context", "all_reduce (world)"}
        assert names(track) >= {"receive plan", "all_gather (dcp)", "broadcast (world)"}
        assert names(track) & {"linear", "norm and linear", "norm and MLP"}
    assert "send result" in names(found[0])
    assert "send result" not in names(found[1])
    assert inside(found[2], "step") >= {"plan", "send plan", "wait for result", "apply result"}
    with engine(tiny_model, None, dcp=2) as plain:
        assert [o.token_ids for o in plain.generate(PROMPTS, GREEDY)] == [o.token_ids for o in outputs]


@pytest.mark.skipif(find_spec("dcprt_kernel") is None, reason="layers are one call by dcprt-kernel alone")
def test_layers_of_one_native_call_show_their_parts(tiny_model: Path, tmp_path: Path) -> None:
    """The trace is of the same call that computes without it."""
    between = {"norm and linear", "rotate and store", "linear", "norm and MLP"}
    for dcp, more in (
        (1, {"attention: context and new tokens"}),
        (2, {"all_gather (dcp)", "attention: context", "all_to_all (dcp)", "merge", "all_reduce (world)"}),
    ):
        out = tmp_path / f"{dcp}.json"
        with engine(tiny_model, out, dcp=dcp) as running:
            running.generate(PROMPTS, GREEDY)
        for rank in range(dcp):
            track = tracks(out)[rank]
            check_sums(track)
            steps = [event["ts"] for event in track if event["name"] == "step"]
            last = [event for event in track if event["ts"] >= steps[-1]]
            assert inside(last, "forward") == {"embedding rows", *(f"layer {i}" for i in range(LAYERS))} | (
                {"all_reduce (world)"} if dcp > 1 else set()
            )
            for i in range(LAYERS):
                assert inside(last, f"layer {i}") == between | more


def test_steps_of_the_ranks_are_at_the_same_time(tiny_model: Path, tmp_path: Path) -> None:
    """All processes use one clock: a step cannot end on one rank before it has begun on the other."""
    out = tmp_path / "steps.json"
    with engine(tiny_model, out, dcp=2) as running:
        running.generate(PROMPTS, GREEDY)
    found = tracks(out)
    steps = [{e["args"]["number"]: e for e in found[rank] if e["name"] == "step"} for rank in (0, 1)]
    for number in steps[0].keys() & steps[1].keys():
        one, other = steps[0][number], steps[1][number]
        assert one["ts"] < end(other) and other["ts"] < end(one)
    for before, after in pairwise(sorted(steps[0])):
        assert end(steps[0][before]) <= steps[0][after]["ts"] + SLACK


@pytest.mark.parametrize("victim", ["rank", "parent"])
def test_a_kill_loses_little(tiny_model: Path, tmp_path: Path, victim: str) -> None:
    out = tmp_path / "steps.json"
    flags = (*tiny_flags(tiny_model), "--kv-cache-tokens", "4096", "--dcp", "2", "--profile-steps", str(out))
    with Server(*flags) as server:
        server.wait_ready().generate(PROMPTS[1], max_new_tokens=8, ignore_eos=True)
        server.settle()
        assert not out.exists()
        os.kill(server.pids(victim)[-1], signal.SIGKILL)
        server.process.wait(60)
        assert server.traces.gone() == []
    found = tracks(out)
    assert sorted(found) == [0, 1, 2]
    assert all(len([e for e in found[rank] if e["name"] == "step"]) >= 8 for rank in (0, 1))
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
