"""Merging attention over parts of the keys gives attention over all of them."""

from __future__ import annotations

import pytest
import torch

from dcprt.attention.partial import Partial, combined_lse, empty_partial, merge, scaled, shares

from .oracle import attend, lse


def partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    seen = [len(k)] * len(q)
    heads = range(q.shape[1])
    return Partial(attend(q, k, v, heads, seen, 0.3).float(), lse(q, k, heads, seen, 0.3).float())


@pytest.mark.parametrize("cut", [0, 1, 5, 12, 13])
def test_two_parts(cut: int) -> None:
    torch.manual_seed(cut)
    q, k, v = torch.randn(3, 2, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    merged = merge(partial(q, k[:cut], v[:cut]), partial(q, k[cut:], v[cut:]))
    whole = partial(q, k, v)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-6, rtol=1e-6)


def test_an_empty_part_weighs_nothing_whatever_it_holds() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 8), torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    real = partial(q, k, v)
    poisoned = Partial(torch.full_like(real.out, torch.nan), torch.full_like(real.lse, -torch.inf))
    for merged in (merge(real, poisoned), merge(poisoned, real)):
        torch.testing.assert_close(merged.out, real.out, atol=0, rtol=0)
        torch.testing.assert_close(merged.lse, real.lse, atol=0, rtol=0)


def test_all_parts_empty_is_zero_not_nan() -> None:
    empty = empty_partial(2, 3, 4)
    poisoned = Partial(torch.full_like(empty.out, torch.nan), empty.lse)
    merged = merge(poisoned, empty)
    assert torch.equal(merged.out, torch.zeros(2, 3, 4))
    assert torch.equal(merged.lse, torch.full((2, 3), -torch.inf))


def test_large_scores_do_not_overflow() -> None:
    a = Partial(torch.ones(1, 1, 2), torch.tensor([[5000.0]]))
    b = Partial(torch.zeros(1, 1, 2), torch.tensor([[5000.0]]))
    merged = merge(a, b)
    torch.testing.assert_close(merged.out, torch.full((1, 1, 2), 0.5))
    torch.testing.assert_close(merged.lse, torch.tensor([[5000.0 + torch.tensor(2.0).log().item()]]))


def test_shares_sum_to_one_or_are_zero() -> None:
    torch.manual_seed(1)
    lses = torch.randn(5, 4, 3) * 300
    lses[2, 1] = -torch.inf
    lses[:, 2, 2] = -torch.inf
    total = shares(lses).sum(0)
    expected = torch.ones(4, 3)
    expected[2, 2] = 0
    torch.testing.assert_close(total, expected)
    assert combined_lse(lses)[2, 2] == -torch.inf
    assert torch.equal(scaled(torch.full((4, 3, 2), torch.nan), torch.zeros(4, 3)), torch.zeros(4, 3, 2))
