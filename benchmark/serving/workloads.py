"""What is asked: requests of random lengths, with shared prefixes, or as a trace recorded them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.prompts import Piece, Prompt, Source, cut, length

TRACE_BLOCK = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for."""


class WorkloadError(Exception):
    """A workload that cannot be made; the text is for the user."""


@dataclass(frozen=True)
class Request:
    """One request; `start` is where the trace has it, in seconds from the trace's beginning."""

    prompt: Prompt
    output_len: int
    start: float = 0.0

    @property
    def input_len(self) -> int:
        return length(self.prompt)


def spread(chosen: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    """Lengths between `mean * (1 - ratio)` and `mean * (1 + ratio)`, all equally likely, and never less than 1."""
    low, high = max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    return [int(n) for n in chosen.integers(low, high, count, endpoint=True)]


def random_requests(count: int, input_len: int, output_len: int, ratio: float, seed: int) -> list[Request]:
    """Prompts that share nothing."""
    chosen = np.random.default_rng(seed)
    inputs, outputs = (spread(chosen, mean, ratio, count) for mean in (input_len, output_len))
    return [Request((Piece(Source.UNIQUE, i, n),), m) for i, (n, m) in enumerate(zip(inputs, outputs))]


def shared_prefix_requests(
    count: int, prefixes: int, prefix_len: int, suffix_len: int, output_len: int, ratio: float, seed: int
) -> list[Request]:
    """Prompts that begin with one of `prefixes`, each about as often, in random order; what follows is their own."""
    chosen = np.random.default_rng(seed)
    suffixes, outputs = (spread(chosen, mean, ratio, count) for mean in (suffix_len, output_len))
    groups = chosen.permutation(np.arange(count) % prefixes)
    return [
        Request((Piece(Source.PREFIX, int(group), prefix_len), Piece(Source.UNIQUE, i, n)), m)
        for i, (group, n, m) in enumerate(zip(groups, suffixes, outputs))
    ]


def read_trace(path: Path, scale: float = 1.0, slowdown: float = 1.0) -> list[Request]:
    """Requests of a trace in Mooncake's format, plain or gzipped, in the order of their time.

    `scale` multiplies all lengths, that of a block too, so that what is shared stays the same part of a prompt; every
    block keeps at least one token. `slowdown` multiplies the times.

    Raises:
        WorkloadError: no such file, or not of this format.
    """
    try:
        return sorted(_requests(path, scale, slowdown), key=lambda request: request.start)
    except FileNotFoundError:
        raise WorkloadError(f"There is no trace at {path}; --trace-path says where it is.") from None
    except OSError as error:
        raise WorkloadError(f"The trace {path} cannot be read: {error}") from None


def _requests(path: Path, scale: float, slowdown: float) -> Iterator[Request]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _request(json.loads(line), scale, slowdown)
                except (KeyError, TypeError, ValueError) as error:
                    raise WorkloadError(f"{path}, line {number}: {type(error).__name__}: {error}") from None


def _request(row: dict[str, Any], scale: float, slowdown: float) -> Request:
    """One line of a trace; the last block is as full as the length says."""
    tokens, ids = int(row["input_length"]), [int(number) for number in row["hash_ids"]]
    if tokens < 1 or len(ids) != -(-tokens // TRACE_BLOCK):
        raise ValueError(f"{len(ids)} hash ids do not fit {tokens} tokens in blocks of {TRACE_BLOCK}")
    lengths = [TRACE_BLOCK] * (len(ids) - 1) + [tokens - TRACE_BLOCK * (len(ids) - 1)]
    pieces = (Piece(Source.TRACE, number, max(1, round(n * scale))) for number, n in zip(ids, lengths))
    return Request(
        tuple(pieces), max(1, round(int(row["output_length"]) * scale)), float(row["timestamp"]) / 1000 * slowdown
    )


def fit(
    requests: Sequence[Request], input_limit: int | None, total_limit: int | None, over: str
) -> tuple[list[Request], str]:
    """The requests a server can take, and a line about what was done to the others, if there were any.

    `over` is `drop`, or `clip`: then prompts are cut at their end, and only a request whose output alone is too long
    is dropped. `total_limit` counts prompt and output.
    """
    kept: list[Request] = []
    dropped: list[int] = []
    clipped: list[int] = []
    for request in requests:
        limit = request.input_len if input_limit is None else input_limit
        if total_limit is not None:
            limit = min(limit, total_limit - request.output_len)
        if request.input_len <= limit:
            kept.append(request)
        elif over == "clip" and limit > 0:
            kept.append(replace(request, prompt=cut(request.prompt, limit)))
            clipped.append(request.input_len - limit)
        else:
            dropped.append(request.input_len)
    return kept, _fit_line(len(requests), dropped, clipped, input_limit, total_limit)


def _fit_line(
    count: int, dropped: list[int], clipped: list[int], input_limit: int | None, total_limit: int | None
) -> str:
    """What `fit` did, or nothing if all requests fit."""
    limits = [] if input_limit is None else [f"inputs of {input_limit:,}"]
    limits += [] if total_limit is None else [f"inputs and outputs of {total_limit:,}"]
    done = []
    if dropped:
        done.append(f"dropped {len(dropped):,} requests with {sum(dropped):,} input tokens")
    if clipped:
        done.append(f"cut {sum(clipped):,} tokens off the prompts of {len(clipped):,}")
    return f"Of {count:,} requests, {' and '.join(done)}: the limit is {' and '.join(limits)} tokens." if done else ""
