"""Spans of several processes, put together as one Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcprt.config import Config
from dcprt.errors import ConfigError
from dcprt.runtime.prepare import prepare
from dcprt.trace import STEP, Recorder, collect


class Clock:
    """What is recorded; each call takes the next turn."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.idle = True

    def tick(self, name: str, *, fail: bool = False) -> str:
        self.calls.append(name)
        if fail:
            raise ValueError(name)
        return name

    def __call__(self, name: str) -> str:
        return self.tick(name)


def read(directory: Path, **options: Any) -> list[dict[str, Any]]:
    out = directory / "out.json"
    collect(directory, out, **options)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    assert [path for path in directory.iterdir() if path.name.startswith("out")] == [out]
    return events


def spans(events: list[dict[str, Any]], track: int) -> list[str]:
    return [event["name"] for event in events if event["ph"] == "X" and event["pid"] == track]


def test_spans_nest_by_their_times(tmp_path: Path) -> None:
    recorder, target = Recorder(tmp_path, 0, "rank 0"), Clock()
    inner = recorder.wrap("inner", target.tick)
    outer = recorder.wrap("outer", lambda: inner("a") + inner("b"))
    assert recorder.wrap_step(outer)() == "ab"
    events = [event for event in read(tmp_path) if event["ph"] == "X"]
    assert [event["name"] for event in events] == [STEP, "outer", "inner", "inner"]
    assert events[0]["ts"] == 0
    for event in events[1:]:
        assert events[0]["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= events[0]["ts"] + events[0]["dur"] + 1e-3
    assert events[0]["args"] == {"number": 1}


def test_every_process_is_a_track(tmp_path: Path) -> None:
    for track, label in ((0, "rank 0"), (1, "rank 1"), (2, "scheduler")):
        recorder = Recorder(tmp_path, track, label)
        recorder.wrap_step(lambda: None)()
    about = [event for event in read(tmp_path) if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in about] == [
        (0, "rank 0"),
        (1, "rank 1"),
        (2, "scheduler"),
    ]


@pytest.mark.parametrize("steps", [1, 3, 4, 6, 7, 10, 20])
def test_the_last_steps_are_kept(tmp_path: Path, steps: int) -> None:
    recorder = Recorder(tmp_path, 0, "rank 0", keep=3)
    for number in range(1, steps + 1):
        recorder.wrap(f"span {number}", lambda: None)()
        recorder.end_step(number)
    assert spans(read(tmp_path, keep=3), 0) == [f"span {n}" for n in range(max(steps - 2, 1), steps + 1)]
    sizes = [path.stat().st_size for path in tmp_path.glob("trace.*")]
    assert max(sizes) < 3 * 64


def test_what_a_killed_process_was_writing_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, "rank 0")
    for number in (1, 2):
        recorder.wrap(f"span {number}", lambda: None)()
        recorder.end_step(number)
    path = tmp_path / "trace.0.rank 0.0"
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert spans(read(tmp_path), 0) == ["span 1"]


def test_an_object_that_is_recorded_is_otherwise_the_same(tmp_path: Path) -> None:
    recorder, target = Recorder(tmp_path, 0, "rank 0"), Clock()
    traced = recorder.traced(target, {"tick": "a tick", "__call__": "a call", "missing": "nothing"})
    assert (traced.tick("x"), traced("y"), traced.idle) == ("x", "y", True)
    with pytest.raises(ValueError, match="z"):
        traced.tick("z", fail=True)
    assert not hasattr(traced, "missing")
    target.idle = False
    assert not traced.idle
    recorder.end_step(1)
    assert spans(read(tmp_path), 0) == ["a tick", "a call", "a tick"]
    assert recorder.traced(target, {})("w") == "w"
    assert target.calls == ["x", "y", "z", "w"]


def test_what_came_before_can_be_forgotten(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, "rank 0")
    recorder.wrap("early", lambda: None)()
    recorder.clear()
    recorder.wrap_step(lambda: None)()
    assert spans(read(tmp_path), 0) == [STEP]


def test_nothing_recorded_is_an_empty_trace(tmp_path: Path) -> None:
    assert read(tmp_path) == []


@pytest.mark.parametrize("path", ["nowhere/steps.json", "."])
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, path: str) -> None:
    config = Config.of(model="/there/is/none", profile_steps=str(tmp_path / path))
    with pytest.raises(ConfigError, match="--profile-steps cannot write"):
        prepare(config, lambda _: None)
