"""Penalties, bias and banned ends against their definitions, token by token; log probabilities against torch's own."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from dcprt.messages import RowSampling
from dcprt.sampling.history import History
from dcprt.sampling.sampler import FAILED, SampleRow, adjusted, logprobs, sample

VOCAB = 23


def row(position: int = 9, history: History | None = None, **params: Any) -> SampleRow:
    full = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, **params}
    return SampleRow(RowSampling(**full), position, history)


def by_definition(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> list[float]:
    """CTRL's repetition penalty over prompt and output, then OpenAI's two over the output."""
    counts = Counter(output)
    found = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        found.append(logit - frequency * counts[token] - presence * (counts[token] > 0))
    return found


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.7])
@pytest.mark.parametrize(("frequency", "presence"), [(0.0, 0.0), (0.5, 0.0), (0.0, -1.5), (2.0, 1.0)])
def test_penalties(repetition: float, frequency: float, presence: float) -> None:
    chosen = random.Random(3)
    prompt = [chosen.randrange(VOCAB) for _ in range(6)]
    output = [chosen.randrange(VOCAB) for _ in range(8)]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    params = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    grown = History(prompt, len(prompt), VOCAB)
    for token in output:
        grown.add(token)
    resumed = History(prompt + output, len(prompt), VOCAB)
    expected = by_definition(logits.tolist(), prompt, output, repetition, frequency, presence)
    for history in (grown, resumed):
        found = adjusted(logits, row(history=history, **params))
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_bias_and_banned_ends() -> None:
    logits = torch.zeros(VOCAB)
    found = adjusted(logits, row(logit_bias=[(2, 5.0), (7, -3.5)], end_ids=[2, 4], min_len=10))
    assert found[[0, 2, 4, 7]].tolist() == [0.0, -math.inf, -math.inf, -3.5]
    late = adjusted(logits, row(position=10, end_ids=[2, 4], min_len=10))
    assert late is logits
    assert logits.tolist() == [0.0] * VOCAB, "the model's logits stay as they are"


def test_greedy_follows_the_adjusted_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    rows = [row(), row(logit_bias=[(0, 9.0)]), row(end_ids=[2], min_len=99)]
    assert sample(logits, rows) == [2, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_finite_logits_fails_alone(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, bad], [1.0, 0.0], [-math.inf, -math.inf]])
    rows = [row(), row(), row(temperature=0.5), row()]
    assert sample(logits, rows) == [1, FAILED, 0, FAILED]


def test_min_p_keeps_what_is_likely_enough() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for min_p, kept in [(0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.5, {0, 1}), (1.0, {0})]:
        rows = [row(position, temperature=1.0, min_p=min_p) for position in range(400)]
        assert set(sample(weights.expand(400, -1), rows)) == kept


@pytest.mark.parametrize("count", [0, 1, 5])
def test_log_probabilities(count: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    expected = logits.double().log_softmax(-1)
    tokens = [4, 0, 22]
    for i, found in enumerate(logprobs(logits, tokens, [count, 0, count])):
        assert found.token == tokens[i]
        assert found.logprob == pytest.approx(float(expected[i, tokens[i]]), abs=1e-5)
        wanted = 0 if i == 1 else count
        assert [token for token, _ in found.top] == expected[i].argsort(descending=True)[:wanted].tolist()
        assert [value for _, value in found.top] == pytest.approx(
            expected[i].sort(descending=True).values[:wanted].tolist(), abs=1e-5
        )
