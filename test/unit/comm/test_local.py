"""Collectives between threads, the arenas' description, and the choice of a backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcprt.comm.arena import Arenas, create_arenas
from dcprt.comm.groups import Groups, connect, default_backend, local_groups
from dcprt.errors import CollectiveError, CollectiveTimeout, ConfigError

T = TypeVar("T")

SIZES = st.integers(1, 5)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SUMMED = st.sampled_from([torch.float32, torch.bfloat16])


def on_every_rank(groups: list[Groups], work: Callable[[Groups], T]) -> list[T]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def tensors(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [(torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(size)]


def ordered(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@settings(max_examples=50, deadline=None)
@given(size=SIZES, shape=SHAPES, dtype=SUMMED)
def test_all_reduce_is_the_ordered_sum(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(size, shape, dtype)
    want = ordered(inputs)
    mine = [x.clone() for x in inputs]
    results = on_every_rank(local_groups(size, 1), lambda g: g.world.all_reduce(mine[g.world.rank]))
    for rank in range(size):
        assert results[rank] is mine[rank]
        assert torch.equal(results[rank], want)


@settings(max_examples=50, deadline=None)
@given(size=SIZES, shape=SHAPES, dtype=SUMMED)
def test_reduce_scatter_gives_each_its_part(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(size, (size, *shape), dtype)
    results = on_every_rank(local_groups(size, 1), lambda g: g.world.reduce_scatter(inputs[g.world.rank]))
    for rank, result in enumerate(results):
        assert torch.equal(result, ordered([x[rank] for x in inputs]))


@settings(max_examples=50, deadline=None)
@given(size=SIZES, shape=SHAPES, dtype=st.sampled_from([torch.float32, torch.int64, torch.bool]))
def test_moves_of_any_dtype(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(size, (size, *shape), dtype)

    def work(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        x = inputs[groups.world.rank]
        gathered, exchanged = groups.world.start_all_gather(x), groups.world.start_all_to_all(x)
        last = groups.world.broadcast(x.clone(), size - 1)
        return gathered.wait(), exchanged.wait(), last

    for rank, (gathered, exchanged, last) in enumerate(on_every_rank(local_groups(size, 1), work)):
        assert torch.equal(gathered, torch.stack(inputs))
        assert torch.equal(exchanged, torch.stack([x[rank] for x in inputs]))
        assert torch.equal(last, inputs[-1])


def test_dcp_groups_are_contiguous_ranks() -> None:
    def work(groups: Groups) -> list[int]:
        groups.world.barrier()
        return groups.dcp.all_gather(torch.tensor(groups.world.rank)).tolist()  # type: ignore[no-any-return]

    assert on_every_rank(local_groups(6, 3), work) == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_timeout_names_operation_group_step_and_missing_rank() -> None:
    first, second, third = local_groups(3, 3, timeout_s=0.05)

    def work(groups: Groups) -> str:
        groups.set_step(17)
        with pytest.raises(CollectiveTimeout) as caught:
            groups.dcp.all_reduce(torch.ones(2))
        with pytest.raises(CollectiveError):
            groups.dcp.barrier()
        return str(caught.value)

    text = "all_reduce of group 'dcp' in step 17: no answer from rank 1 after 0.05 s"
    assert on_every_rank([first, third], work) == [text, text]
    assert second.dcp.rank == 1


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.bfloat16)])
def test_different_calls_are_an_error_on_every_rank(other: Tensor) -> None:
    def work(groups: Groups) -> str:
        with pytest.raises(CollectiveError) as caught:
            groups.world.all_reduce(torch.ones(3) if groups.world.rank else other.clone())
        return str(caught.value)

    for text in on_every_rank(local_groups(2, 1), work):
        assert "the ranks differ: rank 0 called all_reduce of" in text


@pytest.mark.parametrize("tp", [1, 2])
def test_arguments_that_cannot_work(tp: int) -> None:
    world = local_groups(tp, 1)[0].world
    with pytest.raises(CollectiveError, match="float32 and bfloat16, not int64"):
        world.all_reduce(torch.ones(3, dtype=torch.int64))
    with pytest.raises(CollectiveError, match="must be the group's"):
        world.all_to_all(torch.ones(3, 2))
    with pytest.raises(CollectiveError, match="no rank 2"):
        world.broadcast(torch.ones(3), 2)
    world.close()
    with pytest.raises(CollectiveError, match="closed"):
        world.barrier()


def test_groups_of_one_rank_connect_to_nobody() -> None:
    groups = connect("gloo", 0, 1, 1)
    x = torch.randn(1, 3)
    for op in ("all_reduce", "all_to_all", "broadcast"):
        assert torch.equal(getattr(groups.dcp, op)(x.clone()), x)
    assert groups.world.all_gather(x).shape == (1, 1, 3)
    assert torch.equal(groups.world.reduce_scatter(x), x[0])
    groups.world.barrier()
    groups.close()


def test_arenas_survive_json() -> None:
    arenas = create_arenas(6, 3, 4096)
    assert Arenas.from_json(arenas.to_json()) == arenas
    assert [arena.ranks for arena in arenas.dcp] == [3, 3]
    assert len(set(arenas.fds)) == 3
    assert os.fstat(arenas.fds[0]).st_size == 4096 + 2 * 6 * 4096
    arenas.close()
    assert create_arenas(1, 1).fds == ()


def test_backend_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPRT_COMM", "gloo")
    assert default_backend() == "gloo"
    monkeypatch.setenv("DCPRT_COMM", "glo")
    with pytest.raises(ConfigError, match="Did you mean 'gloo'"):
        default_backend()
    with pytest.raises(ConfigError, match="No backend 'smh'"):
        connect("smh", 0, 2, 1)


def test_the_parent_needs_no_torch() -> None:
    code = (
        "import json, sys; from dcprt.comm import arena, groups; groups.default_backend();"
        "arena.create_arenas(4, 2).close();"
        "print(json.dumps([m in sys.modules for m in ('torch', 'dcprt_kernel')]))"
    )
    packages = str(Path(__file__).parents[3] / "python")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": packages}
    )
    assert json.loads(done.stdout) == [False, False]
