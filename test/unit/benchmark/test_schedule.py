"""Starts of requests."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from serving.schedule import arrivals, offered_rate


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_their_distribution(burstiness: float) -> None:
    starts = arrivals(40_001, 20, burstiness, seed=3)
    gaps = np.diff(starts)
    assert starts[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)
    assert offered_rate(starts) == pytest.approx(1 / gaps.mean())


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(arrivals(40_001, 2, 1.0, seed=0))
    for t in (0.1, 0.5, 2.0):
        assert (gaps > t).mean() == pytest.approx(math.exp(-2 * t), abs=0.01)


def test_a_seed_gives_one_schedule() -> None:
    assert arrivals(50, 3, 1, seed=1) == arrivals(50, 3, 1, seed=1) != arrivals(50, 3, 1, seed=2)
    assert arrivals(50, 3, 1, seed=1)[:20] == arrivals(20, 3, 1, seed=1)
    assert all(a <= b for a, b in pairwise(arrivals(50, 3, 1, seed=1)))


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrivals(3, math.inf, 1, seed=0) == [0, 0, 0]
    assert offered_rate([0.0, 0.0]) == offered_rate([]) == math.inf


def test_few_requests() -> None:
    assert arrivals(1, 5, 1, seed=0) == [0.0]
    assert arrivals(0, 5, 1, seed=0) == []
