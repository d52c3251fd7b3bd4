"""Merging and packing partial results, for every instruction set."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("dcprt_kernel.merge")

import torch
from torch import Tensor

from dcprt_kernel import merge as kernel

from .tensors import unaligned

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = torch.nan, torch.inf
SHAPES = [(1, 1, 1), (3, 2, 7), (5, 9, 64), (37, 3, 17), (2, 1, 600), (300, 9, 64)]
"""tokens, heads, dim; the last is shared among threads."""


pytestmark = pytest.mark.usefixtures("isa")


def parts_of(count: int, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """out [parts, tokens, heads, dim] and lse: a third of the parts is empty and holds NaN."""
    outs, lses = torch.randn(count, tokens, heads, dim), torch.randn(count, tokens, heads) * 5
    empty = torch.rand(lses.shape) < 1 / 3
    outs[empty], lses[empty] = NAN, -INF
    return outs, lses


def exact(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, one part after another."""
    wide = lses.double()
    top = torch.where(wide.amax(0) == -INF, 0.0, wide.amax(0))
    weights = (wide - top).exp()
    total = weights.sum(0)
    out = torch.zeros(outs.shape[1:], dtype=torch.float64)
    for part, weight in zip(outs.double(), weights, strict=True):
        here = weight > 0
        out[here] += part[here] * (weight / total)[here].unsqueeze(-1)
    return out, top + total.log()


def unwritten(tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    return unaligned(torch.full((tokens, heads, dim), NAN)), unaligned(torch.full((tokens, heads), NAN))


def merged(outs: Tensor, lses: Tensor, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Two parts."""
    out, lse = unwritten(*outs.shape[1:])
    kernel.merge(outs[0], lses[0], outs[1], lses[1], out, lse, threads)
    return out, lse


def packed_merged(outs: Tensor, lses: Tensor, threads: int = 1) -> tuple[Tensor, Tensor]:
    out, lse = unwritten(*outs.shape[1:])
    kernel.merge_packed(unaligned(torch.cat([outs, lses.unsqueeze(-1)], -1)), out, lse, threads)
    return out, lse


def assert_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_parts(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(sum(shape))
    outs, lses = parts_of(2, *shape)
    outs, lses = unaligned(outs), unaligned(lses)
    found = merged(outs, lses)
    assert_close(found, exact(outs, lses))
    for other in (merged(outs, lses, 2), packed_merged(outs, lses), packed_merged(outs, lses, 2)):
        assert torch.equal(other[0], found[0]) and torch.equal(other[1], found[1])


@pytest.mark.parametrize("count", [0, 1, 3, 64])
def test_packed_parts(count: int) -> None:
    torch.manual_seed(count)
    for shape in SHAPES[:-1]:
        outs, lses = parts_of(count, *shape)
        expected = exact(outs, lses) if count else (torch.zeros(shape), torch.full(shape[:2], -INF))
        for threads in (1, 2):
            assert_close(packed_merged(outs, lses, threads), expected)


def test_an_empty_part_changes_nothing_whatever_it_holds() -> None:
    out, lse = torch.randn(4, 3, 19), torch.randn(4, 3) * 300
    for bad in (NAN, INF, -INF, 1.0):
        empty = torch.full_like(out, bad), torch.full_like(lse, -INF)
        for order in ([(out, lse), empty], [empty, (out, lse)]):
            outs, lses = (torch.stack(parts) for parts in zip(*order, strict=True))
            for merge in (merged, packed_merged):
                found = merge(outs, lses)
                assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def test_all_parts_empty_is_zero_not_nan() -> None:
    for count, merge in ((2, merged), (1, packed_merged), (2, packed_merged), (5, packed_merged)):
        out, lse = merge(torch.full((count, 3, 2, 5), NAN), torch.full((count, 3, 2), -INF))
        assert torch.equal(out, torch.zeros(3, 2, 5)) and torch.equal(lse, torch.full((3, 2), -INF))


def test_a_part_so_light_that_it_weighs_nothing() -> None:
    """exp of the difference is 0 in float32: what it holds is not looked at, as if it were empty."""
    outs, lses = torch.ones(2, 1, 1, 3), torch.tensor([[[500.0]], [[0.0]]])
    outs[1] = NAN
    out, lse = merged(outs, lses)
    assert torch.equal(out, torch.ones(1, 1, 3)) and lse.item() == 500


def test_large_lse() -> None:
    for size in (5000.0, -5000.0, 1e30, -1e30):
        outs, lses = torch.stack([torch.ones(1, 1, 3), torch.zeros(1, 1, 3)]), torch.full((2, 1, 1), size)
        out, lse = merged(outs, lses)
        torch.testing.assert_close(out, torch.full((1, 1, 3), 0.5))
        torch.testing.assert_close(lse, torch.tensor([[size]]) + torch.tensor(2.0).log())


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_number_stays_with_its_token_and_head(bad: float) -> None:
    torch.manual_seed(1)
    shape = (7, 3, 20)
    for place, where in itertools.product((0, 1), ("out", "lse")):
        outs, lses = torch.randn(2, *shape), torch.randn(2, *shape[:2])
        before = merged(outs, lses)
        if where == "out":
            outs[place, 4, 1, 19] = bad
        else:
            lses[place, 4, 1] = bad
        for found in (merged(outs, lses), packed_merged(outs, lses)):
            harmed = torch.zeros(shape[:2], dtype=torch.bool)
            harmed[4, 1] = True
            assert torch.equal(found[0][~harmed], before[0][~harmed])
            assert torch.equal(found[1][~harmed], before[1][~harmed])
            if where == "out":
                assert torch.equal(found[0][4, 1, :19], before[0][4, 1, :19]) and not found[0][4, 1, 19].isfinite()
                assert torch.equal(found[1], before[1])
            else:
                assert found[0][4, 1].isnan().all() and not found[1][4, 1].isfinite()


def test_a_nan_lse_is_not_hidden_by_an_empty_part() -> None:
    outs = torch.ones(2, 1, 1, 3)
    for lses in ([-INF, NAN], [NAN, -INF]):
        for merge in (merged, packed_merged):
            out, lse = merge(outs, torch.tensor(lses).view(2, 1, 1))
            assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize(("tokens", "ranks", "own", "dim"), [(1, 1, 1, 1), (3, 2, 2, 7), (5, 6, 1, 16), (17, 3, 4, 33)])
def test_pack(tokens: int, ranks: int, own: int, dim: int) -> None:
    out, lse = torch.randn(tokens, ranks * own, dim), torch.randn(tokens, ranks * own)
    packed = unaligned(torch.full((ranks, tokens, own, dim + 1), NAN))
    kernel.pack(unaligned(out), unaligned(lse), packed)
    expected = torch.cat([out, lse.unsqueeze(-1)], -1).view(tokens, ranks, own, dim + 1).transpose(0, 1)
    assert torch.equal(packed, expected)


def test_empty_inputs() -> None:
    for shape in ((0, 2, 4), (2, 0, 4), (2, 3, 0)):
        out, lse = merged(torch.zeros(2, *shape), torch.zeros(2, *shape[:2]), 2)
        torch.testing.assert_close(lse, torch.full(shape[:2], 2.0).log())
        packed_merged(torch.zeros(3, *shape), torch.zeros(3, *shape[:2]), 2)
        kernel.pack(out, lse, torch.empty(1, *shape[:2], shape[2] + 1))


def test_merging_what_does_not_fit_is_refused() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    turned, turned_lse = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    packed = torch.zeros(2, 2, 3, 5)
    for wrong in (
        lambda: kernel.merge(out, torch.zeros(2, 4), out, lse, out, lse),
        lambda: kernel.merge(out, lse, torch.zeros(2, 3, 5), lse, out, lse),
        lambda: kernel.merge(out, lse, torch.zeros(1, 3, 4), torch.zeros(1, 3), out, lse),
        lambda: kernel.merge(out, lse, turned, turned_lse, out, lse),
        lambda: kernel.merge(turned, turned_lse, out, lse, out, lse),
        lambda: kernel.merge(out, lse, out, lse, out, torch.zeros(6)),
        lambda: kernel.merge(out, lse, out.bfloat16(), lse, out, lse),
        lambda: kernel.merge(out, lse, torch.zeros(2, 4, 3).mT, lse, out, lse),
        lambda: kernel.merge_packed(packed[..., :4], out, lse),
        lambda: kernel.merge_packed(packed.transpose(1, 2).contiguous(), out, lse),
        lambda: kernel.merge_packed(packed[0], out, lse),
        lambda: kernel.merge_packed(torch.zeros(65, 2, 3, 5), out, lse),
        lambda: kernel.merge_packed(packed.bfloat16(), out, lse),
        lambda: kernel.pack(out, lse, packed),
        lambda: kernel.pack(out, lse, torch.zeros(2, 3, 1, 5)),
        lambda: kernel.pack(out, lse, torch.zeros(3, 2, 1, 4)),
        lambda: kernel.pack(out, lse[:1], torch.zeros(3, 2, 1, 5)),
    ):
        with pytest.raises(ValueError):
            wrong()
