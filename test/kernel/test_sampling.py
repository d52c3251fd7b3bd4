"""Tokens drawn natively, against the distribution in float64, for every instruction set."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

pytest.importorskip("dcprt_kernel.sampling")

import torch
from torch import Tensor

from dcprt_kernel import sampling

NEAR = 1e-6
"""A token of float32 weights may be another one where what is drawn is this close to the end of a token's range."""
LAST = 1 - 2.0**-53
TEMPERATURES = [1e-5, 0.03, 0.7, 1.0, 4.0, 1e4, 1e30]
TOP_KS = [0, 1, 2, 40, 10**6]
TOP_PS = [1.0, 0.9999, 0.8, 0.3, 1e-9]
MIN_PS = [0.0, 1e-4, 0.05, 0.7, 1.0]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Distribution:
    """The tokens that are left, likeliest first, and where the range of each ends, in float64."""

    tokens: Tensor
    ends: Tensor

    @classmethod
    def of(cls, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Distribution:
        return cls.of_sorted(*logits.double().sort(descending=True, stable=True), temperature, top_k, top_p, min_p)

    @classmethod
    def of_sorted(
        cls, values: Tensor, order: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> Distribution:
        weights = ((values - values[0]) / temperature).exp()
        kept = len(weights) if top_k == 0 else min(top_k, len(weights))
        kept = min(kept, max(int((weights >= min_p).sum()), 1))
        sums = weights[:kept].cumsum(0)
        if top_p < 1:
            sums = sums[: int((sums < top_p * sums[-1]).sum()) + 1]
        return cls(order[: len(sums)], sums / sums[-1])

    def token(self, drawn: float) -> int:
        return int(self.tokens[int((self.ends <= drawn).sum())])

    def is_near(self, token: int, drawn: float) -> bool:
        """Whether `drawn` lies in the range of a token that is left, or next to it."""
        place = (self.tokens == token).nonzero().flatten().tolist()
        if not place:
            return False
        begin = self.ends[place[0] - 1].item() if place[0] else 0.0
        return begin - NEAR <= drawn <= self.ends[place[0]].item() + NEAR


def draw(
    logits: Tensor, drawn: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    return sampling.draw(logits, temperature, top_k, top_p, min_p, drawn)


def compare(logits: Tensor, settings: Sequence[tuple[float, int, float, float]], per_setting: int) -> int:
    """Draws for every setting, the first and the last that can be drawn among them; how many were excused."""
    excused = 0
    values, order = logits.double().sort(descending=True, stable=True)
    for temperature, top_k, top_p, min_p in settings:
        expected = Distribution.of_sorted(values, order, temperature, top_k, top_p, min_p)
        for drawn in [0.0, LAST, *torch.rand(per_setting, dtype=torch.float64).tolist()]:
            found = draw(logits, drawn, temperature, top_k, top_p, min_p)
            if found != expected.token(drawn):
                assert expected.is_near(found, drawn), (temperature, top_k, top_p, min_p, drawn, found)
                excused += 1
    return excused


ALL_SETTINGS = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))


@pytest.mark.parametrize("vocab", [1, 2, 17])
def test_small_vocabularies(isa: str, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(vocab + 1)[1:] * 4
    assert compare(logits, ALL_SETTINGS, 1) <= 2


@pytest.mark.parametrize(("vocab", "settings", "excused"), [(1000, 120, 2), (49152, 24, 2)])
def test_large_vocabularies(isa: str, vocab: int, settings: int, excused: int) -> None:
    torch.manual_seed(vocab)
    for spread in (1.0, 6.0):
        chosen = [ALL_SETTINGS[i] for i in torch.randperm(len(ALL_SETTINGS))[:settings].tolist()]
        assert compare(torch.randn(vocab) * spread, chosen, 2) <= excused


@pytest.mark.parametrize("vocab", [2, 17, 1000])
def test_equal_logits_are_ordered_by_token(isa: str, vocab: int) -> None:
    for level in (0.0, -3.5, 1e30):
        logits = torch.full((vocab,), level)
        middles = [(i + 0.5) / vocab for i in range(0, vocab, max(vocab // 50, 1))]
        assert [draw(logits, at) for at in middles] == [int(at * vocab) for at in middles]
        assert [draw(logits, at, top_k=2) for at in (0.2, 0.7)] == [0, 1]
        assert [draw(logits, at, top_p=0.5) for at in (0.0, LAST)] == [0, vocab // 2 - (vocab % 2 == 0)]
        assert [draw(logits, at, min_p=1.0) for at in (0.0, LAST)] == [0, vocab - 1]
    pairs = torch.randn(vocab).repeat_interleave(2)
    best = int(pairs.argmax())
    assert [draw(pairs, at, top_k=2) for at in (0.0, 0.49, 0.51, LAST)] == [best, best, best + 1, best + 1]
    assert draw(pairs, LAST, top_k=1) == best


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_logit_of_minus_infinity_is_never_drawn(isa: str, temperature: float) -> None:
    torch.manual_seed(1)
    logits = torch.full((200,), -torch.inf)
    for allowed in ([0], [199], [70, 3, 140]):
        logits[allowed] = torch.randn(len(allowed))
        for top_k, top_p, min_p in [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 1e-30), (99, 0.99, 1e-9)]:
            for drawn in (0.0, 0.5, LAST):
                assert draw(logits, drawn, temperature, top_k, top_p, min_p) in allowed
        logits[allowed] = -torch.inf


def test_extreme_logits(isa: str) -> None:
    for logits, best in [([3e38, -3e38, 0.0], 0), ([-3e38, -3.1e38, -torch.inf], 0), ([0.0, 1e-38, 2e30], 2)]:
        assert {draw(torch.tensor(logits), drawn) for drawn in (0.0, 0.5, LAST)} == {best}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"), [(1.0, 0, 1.0, 0.0), (0.5, 9, 0.95, 0.02), (3.0, 0, 0.6, 0.0)]
)
def test_draws_follow_the_distribution(isa: str, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(2)
    logits, count = torch.randn(50), 4000
    expected = Distribution.of(logits, temperature, top_k, top_p, min_p)
    probabilities = torch.zeros(50, dtype=torch.float64)
    probabilities[expected.tokens] = expected.ends.diff(prepend=torch.zeros(1, dtype=torch.float64))
    if (top_k, top_p, min_p) == (0, 1.0, 0.0):
        torch.testing.assert_close(probabilities, (logits.double() / temperature).softmax(0))
    evenly = torch.tensor([draw(logits, (i + 0.5) / count, temperature, top_k, top_p, min_p) for i in range(count)])
    assert ((evenly.bincount(minlength=50) - count * probabilities).abs() <= 1 + 2 * NEAR * count).all()
    drawn = torch.rand(count, dtype=torch.float64).tolist()
    tokens = torch.tensor([draw(logits, at, temperature, top_k, top_p, min_p) for at in drawn])
    spread = (probabilities * (1 - probabilities) / count).sqrt()
    assert ((tokens.bincount(minlength=50) / count - probabilities).abs() <= 5 * spread).all()


def test_logits_are_left_as_they_are(isa: str) -> None:
    logits = torch.randn(3, 101)
    before = logits.clone()
    for row in logits:  # each begins elsewhere
        draw(row, 0.5, 0.7, 10, 0.9, 0.01)
    assert torch.equal(logits, before)


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.randn(8)
    for wrong in (
        lambda: draw(torch.randn(0), 0.5),
        lambda: draw(torch.randn(1, 8), 0.5),
        lambda: draw(torch.randn(16)[::2], 0.5),
        lambda: draw(logits.bfloat16(), 0.5),
        lambda: draw(logits.double(), 0.5),
        lambda: draw(logits, 0.5, temperature=0.0),
        lambda: draw(logits, 0.5, temperature=-1.0),
        lambda: draw(logits, 0.5, temperature=torch.nan),
        lambda: draw(logits, 0.5, temperature=torch.inf),
        lambda: draw(logits, 1.0),
        lambda: draw(logits, -1e-9),
        lambda: draw(logits, torch.nan),
        *(lambda p=p: draw(logits, 0.5, top_p=p) for p in (-0.1, 1.1, torch.nan)),
        *(lambda p=p: draw(logits, 0.5, min_p=p) for p in (-0.1, 1.1, torch.nan)),
    ):
        with pytest.raises(ValueError):
            wrong()


def apart(*calls: str) -> list[str]:
    """What each call of `draw` returns, or the name of its exception, or "lost" for one that ends its process or never
    comes back.
    """
    program = f"""
import os, signal, torch
from torch import inf, nan, tensor
from dcprt_kernel.sampling import draw
for call in {calls!r}:
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            print("lost", flush=True)
        continue
    signal.alarm(2)
    try:
        print(eval(f"draw({{call}})"), flush=True)
    except ValueError:
        print("ValueError", flush=True)
    os._exit(0)
"""
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def test_logits_without_a_finite_greatest_are_refused() -> None:
    bad = ["[-inf, -inf]", "[nan, 1.0]", "[inf, 1.0]"]
    assert apart(*(f"tensor({logits}), 1.0, 0, 1.0, 0.0, 0.5" for logits in bad)) == ["ValueError"] * len(bad)


def test_a_temperature_next_to_zero_takes_the_best() -> None:
    assert apart("tensor([1.0, 3.0, 2.0]), 1e-40, 0, 1.0, 0.0, 0.5") == ["1"]


def test_a_huge_temperature_makes_logits_equal_but_those_of_minus_infinity(isa: str) -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    assert [draw(logits, drawn, temperature=1e60) for drawn in (0.1, 0.5, 0.9)] == [3, 1, 0]
