"""Storing rows in pages, and copying pages."""

from __future__ import annotations

import pytest

pytest.importorskip("dcprt_kernel.pages")

import torch
from torch import Tensor

from dcprt_kernel import held
from dcprt_kernel import pages as kernel

from .tensors import unaligned

F32, BF16 = torch.float32, torch.bfloat16
NAN = torch.nan


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 8), (3, 7), (3, 64)])
def test_store(heads: int, dim: int, dtype: torch.dtype) -> None:
    """Rows of part of a larger product, some of them, in any order; all other slots keep their bits."""
    torch.manual_seed(dim)
    for page_size in (1, 4, 16):
        pages, tokens = -(-40 // page_size), 23
        product = torch.randn(tokens, (heads + 4) * dim).to(dtype)
        rows = product.view(tokens, heads + 4, dim)[:, 1 : heads + 1]
        pool = unaligned(torch.full((pages, page_size, heads, dim), NAN, dtype=dtype))
        for count in (0, 1, 19):
            taken, slots = torch.randperm(tokens)[:count], torch.randperm(pages * page_size)[:count]
            expected = pool.clone()
            expected.flatten(0, 1)[slots] = rows[taken]
            kernel.store(rows, taken, slots, pool)
            integers = torch.int32 if dtype == F32 else torch.int16
            assert torch.equal(pool.view(integers), expected.view(integers))


def test_store_heads_that_lie_apart() -> None:
    rows = torch.randn(2, 3, 5).transpose(0, 1)  # [3, 2, 5]: steps between heads larger than between tokens
    pool = torch.zeros(2, 2, 2, 5)
    kernel.store(rows, torch.tensor([2, 0, 2]), torch.tensor([0, 3, 1]), pool)
    assert torch.equal(pool.flatten(0, 1), torch.stack([rows[2], rows[2], torch.zeros(2, 5), rows[0]]))


def test_storing_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    kernel.store(torch.empty(0, 2, 4), none, none, torch.zeros(1, 1, 2, 4))
    kernel.store(torch.empty(3, 2, 4), none, none, torch.zeros(0, 4, 2, 4))


def test_storing_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    rows, pool = torch.ones(3, 2, 4), torch.zeros(2, 4, 2, 4)

    def call(tokens: list[int], slots: list[int], rows: Tensor = rows, pool: Tensor = pool) -> None:
        kernel.store(rows, torch.tensor(tokens), torch.tensor(slots), pool)

    for wrong in (
        lambda: call([0, 1], [0]),
        lambda: call([0, 3], [0, 1]),
        lambda: call([0, -1], [0, 1]),
        lambda: call([0, 1], [0, 8]),
        lambda: call([0, 1], [0, -1]),
        lambda: call([0, 1], [0, 1], rows=rows.bfloat16()),
        lambda: call([0, 1], [0, 1], rows=torch.ones(3, 1, 4)),
        lambda: call([0, 1], [0, 1], rows=torch.ones(3, 2, 5)),
        lambda: call([0, 1], [0, 1], rows=torch.ones(3, 4, 2).mT),
        lambda: call([0, 1], [0, 1], rows=torch.ones(3, 8)),
        lambda: call([0, 1], [0, 1], pool=torch.zeros(4, 2, 2, 4).transpose(0, 1)),
        lambda: kernel.store(rows, torch.tensor([0.0]), torch.tensor([1]), pool),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert not pool.any()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_copy(count: int, dtype: torch.dtype) -> None:
    """All pools at once, of different shapes; all other slots keep their bits, NaN as well."""
    shapes = [(3, 4, 1, 7), (5, 4, 2, 8), (3, 4, 33)]
    pools = [unaligned(torch.randn(shape).to(dtype)) for shape in shapes]
    for pool in pools:
        pool[1, 0] = NAN
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[2, :count] = pool[1, :count]
    kernel.copy(held(pools), 1, 2, count)
    for pool, wanted in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("source", "target", "count"), [(0, 0, 1), (-1, 1, 1), (0, -1, 1), (3, 1, 1), (0, 3, 1), (0, 1, 5), (0, 1, -1)]
)
def test_copying_what_is_outside_is_refused_before_anything_is_written(source: int, target: int, count: int) -> None:
    pools = [torch.arange(64.0).view(4, 4, 4), torch.arange(48.0).view(3, 4, 4)]
    with pytest.raises(ValueError, match="page"):
        kernel.copy(held(pools), source, target, count)
    assert torch.equal(pools[0].flatten(), torch.arange(64.0))
    with pytest.raises(ValueError, match="contiguous"):
        kernel.copy(held([torch.zeros(4, 4, 4).mT]), 0, 1, 1)
    with pytest.raises(ValueError, match="no slots"):
        kernel.copy(held([torch.zeros(2, 0, 4)]), 0, 1, 0)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        kernel.copy(held([torch.zeros(4, 4, dtype=torch.float64)]), 0, 1, 1)
