"""GB/s of weights read by matrix products with few rows, torch against the native kernels, in one run.

python benchmark/bench_linear.py --rows 1 4 16 --dtype bfloat16 float32 --threads 1

Weights of a shape are copied until they are larger than the caches, so that every product reads them from memory. The
best of several passes counts; other work on the machine lowers both sides.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcprt_kernel.linear import code, coded_room, forced_isa, isa_in_use, linear, pack, packed_shape, possible_isas
from systems.machine import best, read_bandwidth

SMOLLM2_135M = ["576x960", "576x576", "576x3072", "1536x576", "576x49152"]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--shapes", nargs="+", default=SMOLLM2_135M, help="INxOUT; SmolLM2-135M at tp=1 by default")
    out.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    out.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    out.add_argument("--isa", nargs="+", choices=possible_isas(), default=[isa_in_use()])
    out.add_argument("--coded", action="store_true", help="bfloat16 matrices are coded; GB/s count the plain weights")
    out.add_argument("--threads", type=int, default=1)
    out.add_argument("--mib", type=int, default=128, help="memory of the weights of one shape; more than the caches")
    out.add_argument("--seconds", type=float, default=0.3, help="about this long per figure")
    out.add_argument("--json", action="store_true", help="one line of JSON per row instead of the table")
    return out


def packed(weight: Tensor, coded: bool) -> Tensor:
    if coded and weight.dtype == torch.bfloat16:
        room = torch.empty(coded_room(weight.shape[0], weight.shape[1]), dtype=torch.uint8)
        return room[: code(weight, room)].clone()
    out = torch.empty(packed_shape(*weight.shape, weight.dtype.itemsize), dtype=weight.dtype)
    pack(weight, out)
    return out


def measure(options: argparse.Namespace, shape: str, rows: int, dtype: torch.dtype) -> tuple[float, list[float]]:
    """GB/s of torch, and of the native product for each instruction set."""
    ins, outs = map(int, shape.split("x"))
    copies = max(1, -(-(options.mib << 20) // (ins * outs * dtype.itemsize)))
    weights = [torch.randn(outs, ins).to(dtype) for _ in range(copies)]
    matrices = [packed(weight, options.coded) for weight in weights]
    x, out = torch.randn(rows, ins).to(dtype), torch.empty(rows, outs)
    total = sum(weight.nbytes for weight in weights) / 1e9

    def native() -> None:
        for matrix in matrices:
            linear(x, matrix, None, out, options.threads)

    def reference() -> list[Tensor]:
        return [F.linear(x, weight) for weight in weights]

    found = []
    for isa in options.isa:
        with forced_isa(isa):
            found.append(total / best(native, options.seconds))
    return total / best(reference, options.seconds), found


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth(options.seconds)
    if not options.json:
        print(f"read bandwidth {bandwidth:.1f} GB/s, {options.threads} threads\n")
        names = "".join(f"{isa:>11} {'ratio':>6} {'of read':>8}" for isa in options.isa)
        print(f"{'type':9} {'in x out':>10} {'rows':>5} {'torch':>7}{names}")
    for name in options.dtype:
        for shape in options.shapes:
            for rows in options.rows:
                torch_rate, rates = measure(options, shape, rows, getattr(torch, name))
                if options.json:
                    line: dict[str, Any] = dict(zip(options.isa, rates, strict=True))
                    line |= {"dtype": name, "shape": shape, "rows": rows, "torch": torch_rate, "read": bandwidth}
                    print(json.dumps(line), flush=True)
                    continue
                cells = "".join(f"{rate:11.1f} {rate / torch_rate:6.2f} {rate / bandwidth:8.0%}" for rate in rates)
                print(f"{name:9} {shape:>10} {rows:5} {torch_rate:7.1f}{cells}", flush=True)


if __name__ == "__main__":
    main()
