"""GB/s of reading memory with so many threads: what bounds decoding. Prints one number.

python benchmark/systems/bandwidth.py THREADS
"""

from __future__ import annotations

import sys
import time

import torch

NUMBERS = 1 << 28
ROUNDS = 8


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    numbers = torch.ones(NUMBERS)
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - begin)
    print(numbers.nbytes / best / 1e9)


if __name__ == "__main__":
    main()
