"""Keys and values that are NaN or infinite reach the queries that see them, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dcprt.attention.partial import Partial
from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.registry import make_backend

NONE = torch.zeros(0, dtype=torch.int64)
NEW = [3, 300, 1, 9]
HEADS, KV_HEADS, DIM = 6, 3, 16

bad_numbers = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
sources = pytest.mark.parametrize("source", ["keys", "values"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def assert_unharmed(found: Partial, expected: Partial, harmed: Sequence[int]) -> None:
    """All but the tokens `harmed`."""
    kept = [token for token in range(len(found.out)) if token not in harmed]
    torch.testing.assert_close(found.out[kept], expected.out[kept])
    torch.testing.assert_close(found.lse[kept], expected.lse[kept])


@bad_numbers
@sources
@dtypes
@pytest.mark.parametrize("position", [0, 1, 37, 255, 256, 299])
@pytest.mark.parametrize("q_to_kv", [[0, 0, 1, 1, 2, 2], [2, 1, 0, 0, 1, 1]])
def test_a_new_token_harms_itself_and_those_behind_it(
    backend_name: str, bad: float, source: str, dtype: torch.dtype, position: int, q_to_kv: list[int]
) -> None:
    torch.manual_seed(position)
    total = sum(NEW)
    q = torch.randn(total, HEADS, DIM).to(dtype)
    k, v = (torch.randn(total, KV_HEADS, DIM).to(dtype) for _ in range(2))
    starts = [0, *itertools.accumulate(NEW)]
    rows = tuple(RowSlice(a, b, 0, 0, NONE) for a, b in itertools.pairwise(starts))
    plan, backend = AttentionPlan(rows, NONE, NONE), make_backend(backend_name)
    expected = backend.new_tokens(q, k, v, q_to_kv, plan, 0.25)
    (k if source == "keys" else v)[starts[1] + position] = bad
    found = backend.new_tokens(q, k, v, q_to_kv, plan, 0.25)
    harmed = range(starts[1] + position, starts[2])
    assert_unharmed(found, expected, harmed)
    if bad != bad or source == "values":
        assert not found.out[harmed].isfinite().any()


@bad_numbers
@sources
@dtypes
def test_a_cached_token_harms_its_row(backend_name: str, bad: float, source: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    page_size, local = 4, [5, 30, 0, 9]
    rows, start, first = [], 0, 1
    for new, length in zip([2, 3, 1, 1], local, strict=True):
        pages = torch.arange(first, first + -(-length // page_size))
        rows.append(RowSlice(start, start + new, length, length, pages))
        start, first = start + new, first + len(pages)
    q = torch.randn(start, HEADS, DIM).to(dtype)
    k_pool, v_pool = (torch.randn(first, page_size, KV_HEADS, DIM).to(dtype) for _ in range(2))
    backend = make_backend(backend_name)
    expected = backend.context(q, k_pool, v_pool, rows, 0.25)
    pool = k_pool if source == "keys" else v_pool
    slot_of(pool, rows[1], 17)[:] = bad
    found = backend.context(q, k_pool, v_pool, rows, 0.25)
    assert_unharmed(found, expected, range(rows[1].start, rows[1].stop))
    if bad != bad or source == "values":
        assert not found.out[rows[1].start : rows[1].stop].isfinite().any()


@bad_numbers
@dtypes
def test_slots_of_no_token_are_not_read(backend_name: str, bad: float, dtype: torch.dtype) -> None:
    """Behind a row's last token, in pages of nobody, and those that an earlier request has left."""
    torch.manual_seed(2)
    page_size, length = 16, 21
    rows = [RowSlice(0, 2, length, length, torch.tensor([3, 1]))]
    q = torch.randn(2, HEADS, DIM).to(dtype)
    pools = [torch.randn(5, page_size, KV_HEADS, DIM).to(dtype) for _ in range(2)]
    backend = make_backend(backend_name)
    expected = backend.context(q, pools[0], pools[1], rows, 0.25)
    for pool in pools:
        pool[[0, 2, 4]] = bad
        pool[1, length - page_size :] = bad
    assert_unharmed(backend.context(q, pools[0], pools[1], rows, 0.25), expected, ())


def slot_of(pool: Tensor, row: RowSlice, position: int) -> Tensor:
    page_size = pool.shape[1]
    return pool[row.pages[position // page_size], position % page_size]
