"""When requests start."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Starts in seconds from the first: gaps of a gamma distribution with mean `1 / rate`.

    A burstiness of 1 is a Poisson process; less comes in bursts, more is more even. An infinite rate starts all at
    once. The gaps are not stretched to fit the rate exactly; `offered_rate` tells what came out.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng((seed, 1)).gamma(burstiness, 1 / (rate * burstiness), max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def offered_rate(starts: Sequence[float]) -> float:
    """Requests per second between the first start and the last; infinite if all start at once."""
    return (len(starts) - 1) / (starts[-1] - starts[0]) if starts and starts[-1] > starts[0] else math.inf
