"""Sampling against a plain reference, and its independence of the batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dcprt.messages import RowSampling
from dcprt.sampling.sampler import SampleRow, sample, uniform


def row(position: int = 0, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> SampleRow:
    return SampleRow(RowSampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed), position)


def allowed(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> dict[int, float]:
    """Tokens and probabilities after temperature, top-k and top-p, by the definition."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    probabilities = weights / weights.sum()
    kept, total = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        kept.append((int(token), probability))
        total += probability
        if total >= top_p:
            break
    return {token: probability / total for token, probability in kept}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 4), (0.8, 6), (1e-6, 0), (1.0, 1), (1.0, 99)])
def test_draws_follow_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.7, 2.2, -3.0, 0.0, 1.1, 0.9])
    count = 3000
    rows = [row(i, temperature=temperature, top_p=top_p, top_k=top_k, seed=7) for i in range(count)]
    drawn = Counter(sample(logits.expand(count, -1), rows))
    expected = allowed(logits.numpy(), temperature, top_p, top_k)
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        spread = (probability * (1 - probability) / count) ** 0.5
        assert abs(drawn[token] / count - probability) < 5 * spread + 1e-9


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 0.0]])
    assert sample(logits, [row(temperature=0.0), row(temperature=0.0)]) == [1, 0]


def test_a_row_is_drawn_alike_in_every_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 200)
    rows = [row(i, seed=i * 11, temperature=0.5 + i) for i in range(5)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(5)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_uniform_depends_on_seed_and_position_only() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    values = [uniform(seed, position) for seed in range(20) for position in range(50)]
    assert len(set(values)) == 1000
    assert all(0 <= value < 1 for value in values)
    assert abs(float(np.mean(values)) - 0.5) < 0.05
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_extreme_temperature_and_logits_stay_in_range() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, -torch.inf]])
    assert sample(logits, [row(temperature=1e-4), row(temperature=100.0)]) == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e60])
def test_a_ban_that_leaves_no_token_is_not_heeded(temperature: float) -> None:
    """All that would be left of the logits is -inf."""
    logits = torch.tensor([[-torch.inf, -torch.inf, 5.0], [1.0, 9.0, 0.0]])
    banned = RowSampling(temperature=temperature, top_p=1.0, top_k=0, seed=0, end_ids=[2], min_len=10)
    rows = [SampleRow(banned, 3), row(3, temperature=0.0)]
    assert sample(logits, rows) == [2, 1]
