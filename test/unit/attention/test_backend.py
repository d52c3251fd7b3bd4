"""Every backend against attention by its definition, on odd sizes."""

from __future__ import annotations

import pytest
import torch

from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.registry import make_backend
from dcprt.attention.torch_backend import QUERY_BLOCK

from .oracle import attend, lse

NONE = torch.zeros(0, dtype=torch.int64)


def plan_of(rows: list[RowSlice]) -> AttentionPlan:
    return AttentionPlan(tuple(rows), NONE, NONE)


def rows_of(new: list[int], local: list[int], page_size: int, pages: list[int]) -> list[RowSlice]:
    """Rows whose pages are taken from `pages` in turn."""
    rows, start, free = [], 0, iter(pages)
    for count, length in zip(new, local, strict=True):
        own = [next(free) for _ in range(-(-length // page_size))]
        rows.append(RowSlice(start, start + count, length, length, torch.tensor(own, dtype=torch.int64)))
        start += count
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 8), (6, 3, 24), (12, 3, 64), (5, 1, 40)])
def test_context(backend_name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    page_size, local, new = 4, [0, 1, 4, 11, 30], [3, 1, 2, 1, 5]
    pages = torch.randperm(19)[:17] + 1
    rows = rows_of(new, local, page_size, pages.tolist())
    k_pool = torch.full((21, page_size, kv_heads, dim), torch.nan, dtype=dtype)
    v_pool = k_pool.clone()
    q = torch.randn(sum(new), heads, dim).to(dtype)
    expected, expected_lse = [], []
    groups = [h // (heads // kv_heads) for h in range(heads)]
    for row in rows:
        k, v = torch.randn(row.local_len, kv_heads, dim).to(dtype), torch.randn(row.local_len, kv_heads, dim).to(dtype)
        for i in range(row.local_len):
            k_pool[row.pages[i // page_size], i % page_size] = k[i]
            v_pool[row.pages[i // page_size], i % page_size] = v[i]
        queries = q[row.start : row.stop]
        seen = [row.local_len] * len(queries)
        expected.append(attend(queries, k, v, groups, seen, 0.2))
        expected_lse.append(lse(queries, k, groups, seen, 0.2))
    part = make_backend(backend_name).context(q, k_pool, v_pool, rows, 0.2)
    torch.testing.assert_close(part.out, torch.cat(expected).float(), atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(part.lse, torch.cat(expected_lse).float(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("q_to_kv", [[0], [0, 0, 0, 1, 1, 1], [0, 1, 1], [2, 2, 3], [1, 1]])
@pytest.mark.parametrize("new", [[1], [7, 1, 33], [QUERY_BLOCK + 5, 2]])
def test_new_tokens(backend_name: str, q_to_kv: list[int], new: list[int]) -> None:
    torch.manual_seed(len(new))
    kv_heads, dim = max(q_to_kv) + 1, 16
    total = sum(new)
    q, k, v = (
        torch.randn(total, len(q_to_kv), dim),
        torch.randn(total, kv_heads, dim),
        torch.randn(total, kv_heads, dim),
    )
    rows = rows_of(new, [0] * len(new), 4, [])
    part = make_backend(backend_name).new_tokens(q, k, v, q_to_kv, plan_of(rows), 0.25)
    for row in rows:
        own = slice(row.start, row.stop)
        seen = list(range(1, row.stop - row.start + 1))
        torch.testing.assert_close(part.out[own], attend(q[own], k[own], v[own], q_to_kv, seen, 0.25).float())
        torch.testing.assert_close(part.lse[own], lse(q[own], k[own], q_to_kv, seen, 0.25).float())


def test_no_rows(backend_name: str) -> None:
    part = make_backend(backend_name).context(
        torch.zeros(0, 2, 8), torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), [], 1.0
    )
    assert part.out.shape == (0, 2, 8)
