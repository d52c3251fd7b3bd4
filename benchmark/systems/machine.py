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

ROWS = 1024
SECONDS = 0.5
"""About this long for each figure."""


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of at least three calls."""
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    times = 0
    while times < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
        times += 1
    return least


def read_bandwidth(seconds: float) -> float:
    """GB/s of reading memory by torch's sum of a GiB: less may lie in caches of the host that a guest does not see."""
    numbers = torch.ones(1 << 28)
    return numbers.nbytes / best(numbers.sum, seconds) / 1e9


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    matrix = torch.ones(ROWS, ROWS, dtype=torch.bfloat16)
    product = 2 * ROWS**3 / best(lambda: matrix @ matrix, SECONDS) / 1e9
    print(json.dumps({"read_gb_s": read_bandwidth(SECONDS), "bf16_gflops": product}))


if __name__ == "__main__":
    main()
