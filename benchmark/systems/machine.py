"""What the machine gives right now, as JSON: GB/s of reading memory, which bounds decoding, and GFLOP/s of bfloat16
products, which bounds prefill. On a shared machine both change within minutes.

    python benchmark/systems/machine.py THREADS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

NUMBERS = 1 << 27
ROWS = 1024
ROUNDS = 8


def best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    found = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - begin)
    return found


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    numbers, matrix = torch.ones(NUMBERS), torch.ones(ROWS, ROWS, dtype=torch.bfloat16)
    read = numbers.nbytes / best(numbers.sum) / 1e9
    product = 2 * ROWS**3 / best(lambda: matrix @ matrix) / 1e9
    print(json.dumps({"read_gb_s": read, "bf16_gflops": product}))


if __name__ == "__main__":
    main()
