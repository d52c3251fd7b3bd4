"""Where the time of steps goes: spans, which each process records, put together as one Chrome trace.

A span is a name, its begin and its duration in nanoseconds of the monotonic clock, which all processes of a host share.
A process writes its spans behind every step into one of two files, each of which takes `KEPT_STEPS` steps before the
other is begun anew: so a killed process loses no more than the step it was in, and the files stay small.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Span = tuple[str, int, int]

clock = perf_counter_ns
"""Nanoseconds of a clock that all processes of a host share."""

KEPT_STEPS = 256
"""Steps of each process in a trace."""

STEP = "step"
"""The span that has a step's number; the spans of its parts lie within it."""


class Part:
    """Names of spans in a layer, however its parts are called."""

    LINEAR = "linear"
    NORM_AND_LINEAR = "norm and linear"
    NORM_AND_MLP = "norm and MLP"
    ROTATE_AND_STORE = "rotate and store"
    CONTEXT = "attention: context"
    NEW_TOKENS = "attention: new tokens"
    CONTEXT_AND_NEW_TOKENS = "attention: context and new tokens"
    GATHERED_KV = "attention: gathered KV"
    MERGE = "merge"
    ADD_BIAS = "add bias"

    @staticmethod
    def collective(operation: str, group: str) -> str:
        """An operation between the ranks of a group."""
        return f"{operation} ({group})"


_PREFIX = "trace"
_HEADER = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The spans of one step, and of what came between it and the one before."""

    number: int
    spans: list[Span]


class Recorder:
    """The spans of one process, track `track` of the trace. `label` is its name there."""

    def __init__(self, directory: str | Path, track: int, label: str, keep: int = KEPT_STEPS) -> None:
        self._paths = [Path(directory) / f"{_PREFIX}.{track}.{label}.{part}" for part in (0, 1)]
        self._keep = keep
        self._steps = 0
        self._spans: list[Span] = []
        self._file = self._paths[0].open("wb", buffering=0)

    def add(self, name: str, begin: int, end: int) -> None:
        """A span from `begin` to `end`, nanoseconds of `clock`."""
        self._spans.append((name, begin, end - begin))

    def wrap(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        """`call`, whose every run is a span."""

        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self._spans.append((name, begin, clock() - begin))

        return recorded

    def wrap_step(self, call: Callable[P, R]) -> Callable[P, R]:
        """`call`, whose every run is a step, numbered from 1 on."""
        recorded = self.wrap(STEP, call)

        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            result = recorded(*args, **kwargs)
            self.end_step(self._steps + 1)
            return result

        return step

    def traced(self, target: T, spans: Mapping[str, str]) -> T:
        """`target` for its users, with those of its methods recorded that `spans` names: name of method to span."""
        found = {name: span for name, span in spans.items() if hasattr(target, name)}
        return cast(T, _Traced(self, target, found))

    def clear(self) -> None:
        """Forget what is not yet written."""
        self._spans.clear()

    def end_step(self, number: int) -> None:
        """Write all spans since the step before."""
        if self._steps and self._steps % self._keep == 0:
            self._file.close()
            self._file = self._paths[self._steps // self._keep % 2].open("wb", buffering=0)
        self._steps += 1
        body = msgspec.msgpack.encode(Frame(number, self._spans))
        self._file.write(_HEADER.pack(len(body)) + body)
        self._spans.clear()


def untraced(x: T) -> tuple[T, Recorder | None]:
    """What x stands for, if it comes from `Recorder.traced`, and that recorder; else x itself and None."""
    return (x._target, x._recorder) if isinstance(x, _Traced) else (x, None)


class _Traced:
    """Stands for an object, and is recorded."""

    def __init__(self, recorder: Recorder, target: Any, spans: Mapping[str, str]) -> None:
        self._target = target
        self._recorder = recorder
        for name, span in spans.items():
            setattr(self, name, recorder.wrap(span, getattr(target, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self).get("__call__", self._target)(*args, **kwargs)


@dataclass(frozen=True)
class Track:
    """One process of a trace and its steps, in order."""

    number: int
    label: str
    frames: list[Frame]


def collect(directory: str | Path, out: str | Path, keep: int = KEPT_STEPS) -> int:
    """Write what the recorders of `directory` have recorded as a Chrome trace; the last `keep` steps of each.

    Returns the number of the last step that any of them has.

    Raises:
        OSError: `out` cannot be written.
    """
    tracks = list(_tracks(Path(directory), keep))
    events: list[dict[str, Any]] = []
    begin = min((span[1] for track in tracks for frame in track.frames for span in frame.spans), default=0)
    for track in tracks:
        about = {"ph": "M", "pid": track.number, "tid": 0}
        events.append({**about, "name": "process_name", "args": {"name": track.label}})
        events.append({**about, "name": "process_sort_index", "args": {"sort_index": track.number}})
        events += _events(track, begin)
    body = msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})
    unfinished = Path(f"{out}.{os.getpid()}")
    unfinished.write_bytes(body)
    unfinished.replace(out)
    return max((frame.number for track in tracks for frame in track.frames), default=0)


def _tracks(directory: Path, keep: int) -> Iterator[Track]:
    found: dict[tuple[int, str], list[Frame]] = {}
    for path in directory.glob(f"{_PREFIX}.*.[01]"):
        _, number, label, _ = path.name.split(".")
        found.setdefault((int(number), label), []).extend(_frames(path.read_bytes()))
    for (track, label), frames in sorted(found.items()):
        frames.sort(key=lambda frame: frame.number)
        yield Track(track, label, frames[-keep:])


def _frames(data: bytes) -> Iterator[Frame]:
    """All whole frames; one that was cut off by the end of its process is left out."""
    at = 0
    while at + _HEADER.size <= len(data):
        (size,) = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + size <= len(data):
            yield msgspec.msgpack.decode(data[at : at + size], type=Frame)
        at += size


def _events(track: Track, begin: int) -> Iterator[dict[str, Any]]:
    """Complete events in the order of their begin, outer ones first; times in microseconds since `begin`."""
    spans = [(span[1], -span[2], span[0], frame.number) for frame in track.frames for span in frame.spans]
    for start, minus, name, number in sorted(spans):
        event = {
            "name": name,
            "ph": "X",
            "pid": track.number,
            "tid": 0,
            "ts": (start - begin) / 1e3,
            "dur": -minus / 1e3,
        }
        yield {**event, "args": {"number": number}} if name == STEP else event
