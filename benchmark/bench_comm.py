"""Microseconds per collective, by backend, ranks and size, between real processes.

python benchmark/bench_comm.py --op all_reduce --ranks 2 4 8 --elements 1 576 65536
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcprt.comm.arena import DEFAULT_SLOT_BYTES, create_arenas

if TYPE_CHECKING:
    from torch import Tensor

    from dcprt.comm.protocol import Collective

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--op", choices=OPS, nargs="+", default=["all_reduce"])
    out.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    out.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    out.add_argument("--elements", type=int, nargs="+", default=[1, 576, 9216, 147456, 1179648])
    out.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    out.add_argument("--seconds", type=float, default=0.5, help="about this long per figure")
    out.add_argument("--slot-bytes", type=int, default=DEFAULT_SLOT_BYTES, help="size of a slot of the arena")
    out.add_argument("--child", default="", help=argparse.SUPPRESS)
    return out


def child(job: dict[str, Any]) -> None:
    """One rank: rank 0 prints one line of JSON per op and size, the best of 3 means in microseconds."""
    import torch

    from dcprt.comm.arena import Arenas
    from dcprt.comm.groups import connect

    torch.set_num_threads(1)
    rank, ranks = job["rank"], job["ranks"]
    arenas = Arenas.from_json(job["arenas"])
    groups = connect(job["backend"], rank, ranks, 1, arenas=arenas, directory=job["directory"], timeout_s=60)
    for op in job["ops"]:
        for count in job["elements"]:
            shape = (ranks, -(-count // ranks)) if op in ("reduce_scatter", "all_to_all") else (count,)
            x = torch.zeros(shape, dtype=getattr(torch, job["dtype"]))
            pilot = torch.tensor([mean(groups.world, op, x, 20)])
            groups.world.broadcast(pilot)
            times = max(5, min(20000, int(job["seconds"] / 3 * 1e6 / pilot.item())))
            best = min(mean(groups.world, op, x, times) for _ in range(3))
            if rank == 0:
                print(json.dumps([op, count, best]), flush=True)
    groups.world.barrier()
    groups.close()


def mean(group: Collective, op: str, x: Tensor, times: int) -> float:
    """Microseconds of one call, over `times` of them."""
    call = getattr(group, op)
    group.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        call(x)
    return (time.perf_counter() - begin) / times * 1e6


def measure(options: argparse.Namespace, backend: str, ranks: int) -> dict[tuple[str, int], float]:
    """Figures of one backend at one number of ranks, by (op, elements)."""
    arenas = create_arenas(ranks, 1, options.slot_bytes)
    passive = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(ranks):
            job = {
                "rank": rank,
                "ranks": ranks,
                "backend": backend,
                "arenas": arenas.to_json(),
                "ops": options.op,
                "directory": directory,
                "elements": options.elements,
                "dtype": options.dtype,
                "seconds": options.seconds,
            }
            command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(command, pass_fds=arenas.fds, stdout=output, text=True, env={**os.environ, **passive})
            )
        text = processes[0].communicate()[0]
        failed = [rank for rank, process in enumerate(processes) if process.wait() != 0]
    arenas.close()
    if failed:
        raise SystemExit(f"{backend} at {ranks} ranks: ranks {failed} failed")
    rows = [json.loads(line) for line in text.splitlines()]
    return {(op, count): figure for op, count, figure in rows}


def main() -> None:
    options = parser().parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    ratio = f"{options.backends[-1]}/{options.backends[0]}" if len(options.backends) > 1 else ""
    print(f"microseconds per call, {options.dtype}, {os.cpu_count()} cores")
    heads = "".join(f"{name:>12}" for name in (*options.backends, ratio))
    print(f"{'op':<16}{'ranks':>6}{'elements':>10}{heads}")
    for ranks in options.ranks:
        figures = [measure(options, backend, ranks) for backend in options.backends]
        for op in options.op:
            for count in options.elements:
                row = [figure[op, count] for figure in figures]
                cells = "".join(f"{cell:12.1f}" for cell in row)
                against = f"{row[-1] / row[0]:11.1f}x" if ratio else ""
                print(f"{op:<16}{ranks:>6}{count:>10}{cells}{against}", flush=True)


if __name__ == "__main__":
    main()
