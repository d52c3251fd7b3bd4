"""One rank of test_collectives.py, a process of its own: runs the cases it is told, prints JSON for each.

The cases come as an argument; a line on stdin with the number of one begins it. A case is
`{"scenario": ..., "backend": ..., "tp": ..., "dcp": ..., "arenas": ..., "directory": ..., "options": {...}}`.
Groups stay open until stdin ends. Every rank can make the inputs of all ranks, and so knows the right answer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcprt.comm.arena import Arenas
from dcprt.comm.groups import Groups, connect
from dcprt.comm.protocol import Collective
from dcprt.errors import CollectiveError, CollectiveTimeout

SUMS = ("all_reduce", "reduce_scatter")
PIECED = ("reduce_scatter", "all_to_all")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass
class Case:
    groups: Groups
    rank: int
    tp: int
    dcp: int
    options: dict[str, Any]

    def group(self, name: str) -> tuple[Collective, str]:
        """A group, and a word that its ranks share and others do not."""
        if name == "world":
            return self.groups.world, "world"
        return self.groups.dcp, f"dcp-{self.rank // self.dcp}"


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: str) -> Tensor:
    """The same tensor on every rank for the same seed; sums of it depend on their order."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(60))
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 100).to(dtype)
    return torch.randint(-(2**40) if dtype == torch.int64 else 0, 2, shape, generator=generator).to(dtype)


def ordered(parts: list[Tensor]) -> Tensor:
    total = parts[0].float().clone()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def right_answer(op: str, inputs: list[Tensor], rank: int, root: int) -> Tensor:
    if op == "all_reduce":
        return ordered(inputs)
    if op == "all_gather":
        return torch.stack(inputs)
    if op == "reduce_scatter":
        return ordered([x[rank] for x in inputs])
    if op == "all_to_all":
        return torch.stack([x[rank] for x in inputs])
    return inputs[root]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def begin(
    group: Collective, word: str, op: str, shape: tuple[int, ...], dtype: torch.dtype, root: int
) -> Callable[[], None]:
    """Starts `op`; the function returned waits for it and compares."""
    full = (group.size, *shape) if op in PIECED else shape
    inputs = [make(full, dtype, f"{word}/{j}/{op}/{full}/{dtype}") for j in range(group.size)]
    x = inputs[group.rank].clone()
    if len(full) > 1 and full[-1] > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    start = getattr(group, f"start_{op}")
    handle = start(x, root) if op == "broadcast" else start(x)

    def check() -> None:
        result = handle.wait()
        want = right_answer(op, inputs, group.rank, root)
        assert same_bits(result, want), f"{word} {op} {full} {dtype} root {root}: {result} is not {want}"
        assert handle.wait() is result
        if op in ("all_reduce", "broadcast"):
            assert result is x

    return check


def operations(case: Case) -> None:
    """Every operation, dtype and shape, on both groups."""
    shapes = [(1,), (7,), (576,), (3, 5), (2, 3, 17), (0,), (4, 0), (1025,), ()]
    shapes += [tuple(shape) for shape in case.options.get("shapes", [])]
    for name in ("world", "dcp"):
        group, word = case.group(name)
        for op in OPS:
            dtypes = [torch.float32, torch.bfloat16]
            dtypes += [] if op in SUMS else [torch.int64, torch.uint8, torch.bool, torch.float64]
            for dtype in dtypes:
                for shape in shapes:
                    for root in range(group.size) if op == "broadcast" else (0,):
                        begin(group, word, op, shape, dtype, root)()
        group.barrier()


def rounds(case: Case) -> None:
    """Random operations on both groups, several of them under way at once."""
    common = random.Random(case.options["seed"])
    mine = random.Random(case.rank)
    under_way: list[Callable[[], None]] = []
    for n in range(case.options["rounds"]):
        name, op = common.choice(("world", "dcp")), common.choice(OPS)
        shape = (common.choice((1, 3, 64, 576, 1000, common.randrange(case.options["largest"]))),)
        dtype = common.choice((torch.float32, torch.bfloat16))
        depth, kind = common.choice((0, 0, 1, 3)), common.random()
        case.groups.set_step(n)
        group, word = case.group(name)
        root = common.randrange(group.size) if op == "broadcast" else 0
        under_way.append(begin(group, f"{word}/{n}", op, shape, dtype, root))
        if mine.random() < 0.01:
            time.sleep(0.001)
        while len(under_way) > depth:
            under_way.pop(0)()
        if kind < 0.02:
            group.barrier()
    for check in under_way:
        check()


def interleaved(case: Case) -> None:
    """Operations under way in two groups at once, waited for in both orders."""
    for n in range(50):
        first = begin(case.groups.world, f"world/{n}", "all_gather", (33,), torch.int64, 0)
        group, word = case.group("dcp")
        second = begin(group, f"{word}/{n}", "all_reduce", (65,), torch.float32, 0)
        third = begin(case.groups.world, f"again/{n}", "reduce_scatter", (9,), torch.bfloat16, 0)
        for check in (first, second, third) if n % 2 else (third, second, first):
            check()


def absent(case: Case) -> str:
    """All but some ranks call; they are told who is missing."""
    world = case.groups.world
    begin(world, "before", "all_reduce", (5,), torch.float32, 0)()
    case.groups.set_step(17)
    if case.rank in case.options["absent"]:
        return ""
    try:
        getattr(world, case.options["op"])(torch.ones(world.size, 3))
    except CollectiveTimeout as error:
        first = str(error)
    else:
        raise AssertionError("no timeout")
    try:
        world.barrier()
    except CollectiveError:
        return first
    raise AssertionError("the group went on after a timeout")


def mismatch(case: Case) -> str:
    """Rank 1 calls something else than the others."""
    case.groups.set_step(3)
    world = case.groups.world
    op, count = case.options["calls"][1 if case.rank == 1 else 0]
    try:
        getattr(world, op)(torch.ones(count))
        world.barrier()
    except CollectiveTimeout as error:
        raise AssertionError(f"not a mismatch: {error}") from error
    except CollectiveError as error:
        return str(error)
    raise AssertionError("no error")


def killed(case: Case) -> str:
    """Rank 1 dies between two operations; the others get an error within the deadline."""
    world = case.groups.world
    begin(world, "before", "all_reduce", (5,), torch.float32, 0)()
    if case.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.all_reduce(torch.ones(1000))
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


SCENARIOS: dict[str, Callable[[Case], str | None]] = {
    f.__name__: f for f in (operations, rounds, interleaved, absent, mismatch, killed)
}


def main() -> None:
    torch.set_num_threads(1)
    rank, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    kept: list[Groups] = []
    for line in sys.stdin:
        case = cases[int(line)]
        arenas = Arenas.from_json(case["arenas"])
        try:
            groups = connect(
                case["backend"], rank, case["tp"], case["dcp"], arenas=arenas, directory=case["directory"],
                timeout_s=case["options"].get("timeout_s", 30),
            )  # fmt: skip
            kept.append(groups)
            told = SCENARIOS[case["scenario"]](Case(groups, rank, case["tp"], case["dcp"], case["options"]))
            answer = {"ok": True, "told": told or ""}
        except (AssertionError, RuntimeError, CollectiveError):
            answer = {"ok": False, "told": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    for groups in kept:
        groups.close()


if __name__ == "__main__":
    main()
