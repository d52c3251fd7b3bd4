"""The native shared-memory group, with threads for ranks: each maps the same arena."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("dcprt_kernel")

import torch
from torch import Tensor

from dcprt.comm.arena import create_arena
from dcprt_kernel import Op, ShmGroup, ShmMismatchError, ShmTimeoutError

RANKS, SLOT_BYTES = 3, 4096


@pytest.fixture
def ranks() -> Iterator[list[ShmGroup]]:
    arena = create_arena("test", RANKS, SLOT_BYTES)
    groups = [ShmGroup(arena.fd, rank, RANKS, SLOT_BYTES) for rank in range(RANKS)]
    os.close(arena.fd)
    yield groups
    for group in groups:
        group.close()


def call(group: ShmGroup, op: Op, x: Tensor, out: Tensor) -> Tensor:
    group.start(op, x, out, 0, 10)
    group.finish(10)
    return out


def reduced(group: ShmGroup, x: Tensor) -> Tensor:
    return call(group, Op.ALL_REDUCE, x, torch.empty_like(x))


def on_every_rank(groups: list[ShmGroup], work: Callable[[int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, range(len(groups))))


def special_values() -> Tensor:
    """Every bfloat16, among them infinities, subnormals and both zeros; of the NaNs one."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.cat([every[~every.isnan()], torch.tensor([float("nan")], dtype=torch.bfloat16)])


def test_bfloat16_rounds_as_torch_does(ranks: list[ShmGroup]) -> None:
    values = special_values()
    orders = [torch.randperm(len(values), generator=torch.Generator().manual_seed(j)) for j in range(RANKS)]
    shuffled = [values[order] for order in orders]
    want = (shuffled[0].float() + shuffled[1].float() + shuffled[2].float()).to(torch.bfloat16)
    for got in on_every_rank(ranks, lambda j: reduced(ranks[j], shuffled[j])):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


@pytest.mark.parametrize("count", [0, 1, 15, 1024, 1025, 4095, 4097, 30000])
def test_sums_of_any_length_are_in_rank_order(ranks: list[ShmGroup], count: int) -> None:
    inputs = [torch.randn(count) * 10.0**j for j in range(RANKS)]
    want = inputs[0] + inputs[1] + inputs[2]
    for got in on_every_rank(ranks, lambda j: reduced(ranks[j], inputs[j])):
        assert torch.equal(got, want)


def test_waiting_lets_other_threads_run(ranks: list[ShmGroup]) -> None:
    """The last rank comes only after it has run Python code while the others waited in native code."""
    turns = 0
    x = torch.ones(8)
    waiting = [threading.Thread(target=reduced, args=(ranks[j], x.clone())) for j in (0, 1)]
    for thread in waiting:
        thread.start()
    while turns < 100_000:
        turns += 1
    assert all(thread.is_alive() for thread in waiting)
    assert reduced(ranks[2], x).tolist() == [3.0] * 8
    for thread in waiting:
        thread.join()


def test_a_watcher_can_end_a_waiting_process() -> None:
    code = (
        "import os, threading, torch, dcprt_kernel as k; from dcprt.comm.arena import create_arena;"
        "g = k.ShmGroup(create_arena('test', 2, 4096).fd, 0, 2, 4096); x = torch.ones(3);"
        "threading.Timer(0.1, os._exit, (7,)).start();"
        "g.start(k.Op.ALL_REDUCE, x, x, 0, 600); g.finish(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert done.returncode == 7


def test_missing_ranks_are_named(ranks: list[ShmGroup]) -> None:
    x = torch.ones(3)
    ranks[1].start(Op.ALL_GATHER, x, torch.empty(9), 0, 1)
    with pytest.raises(ShmTimeoutError) as caught:
        ranks[1].finish(0.01)
    assert caught.value.missing == (0, 2)


def test_different_calls_are_described(ranks: list[ShmGroup]) -> None:
    ranks[0].start(Op.ALL_REDUCE, torch.ones(3), torch.ones(3), 0, 1)
    ranks[1].start(Op.ALL_GATHER, torch.ones(2, dtype=torch.int64), torch.ones(6, dtype=torch.int64), 0, 1)
    ranks[2].start(Op.BARRIER, torch.empty(0), torch.empty(0), 0, 1)
    for group in ranks:
        with pytest.raises(ShmMismatchError) as caught:
            group.finish(1)
        told = ("all_reduce of 12 bytes of float32", "all_gather of 16 bytes of int64", "barrier")
        assert caught.value.calls == told


def test_arguments_that_cannot_work(ranks: list[ShmGroup]) -> None:
    x = torch.ones(6)
    for op, bad, out in [
        (Op.ALL_REDUCE, x.long(), x.long()),
        (Op.ALL_REDUCE, x.reshape(2, 3).T, x),
        (Op.ALL_REDUCE, x, x[:5]),
        (Op.ALL_GATHER, x, x.clone()),
        (Op.BROADCAST, x, x.clone()),
        (Op.ALL_TO_ALL, x[:5], x[:5].clone()),
    ]:
        with pytest.raises(ValueError):
            ranks[0].start(op, bad, out, 0, 1)
    with pytest.raises(ValueError, match="not open"):
        ShmGroup(987654, 0, 2, 4096)
    arena = create_arena("test", 2, 4096)
    with pytest.raises(ValueError, match="needs"):
        ShmGroup(arena.fd, 0, 4, 4096)
    os.close(arena.fd)
