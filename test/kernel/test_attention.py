"""Native attention against its definition and the torch backend, for every instruction set and number of threads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

pytest.importorskip("dcprt_kernel.attention")

import torch
from torch import Tensor

from dcprt.attention.backend import FusedBackend
from dcprt.attention.native_backend import NativeBackend
from dcprt.attention.partial import Partial, merge
from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.torch_backend import TorchBackend
from dcprt_kernel import attention
from dcprt_kernel.linear import possible_isas

F32, BF16 = torch.float32, torch.bfloat16
NONE = torch.zeros(0, dtype=torch.int64)
EPS = 2.0**-23


@dataclass(frozen=True)
class Shape:
    """Heads and their dimensions; where values are `latent`, they are the first elements of the keys."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def groups(self) -> list[int]:
        return [h * self.kv_heads // self.heads for h in range(self.heads)]


SHAPES = [
    Shape(9, 3, 64, 64),
    Shape(4, 1, 128, 128),
    Shape(16, 1, 576, 512, latent=True),
    Shape(6, 3, 24, 40),
    Shape(5, 5, 8, 8),
    Shape(26, 2, 72, 56),
]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def exact(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[int], scale: float, causal: bool = False) -> Partial:
    """Attention of q [tokens, heads, dim] to k, v [keys, kv_heads, dim] in float64. If causal, the last keys are those
    of the queries' own tokens.
    """
    index = torch.tensor(groups, dtype=torch.int64)
    keys, values = k[:, index].double(), v[:, index].double()
    scores = torch.einsum("thd,khd->htk", q.double(), keys) * scale
    if causal:
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(ahead, -torch.inf)
    out = torch.einsum("htk,khd->thd", scores.softmax(-1), values)
    return Partial(out, scores.logsumexp(-1).T)


def assert_equal(part: Partial, expected: Partial, atol: float = 2e-6) -> None:
    torch.testing.assert_close(part.out, expected.out.float(), atol=atol, rtol=2e-6)
    torch.testing.assert_close(part.lse, expected.lse.float(), atol=min(atol, 4e-6), rtol=2e-6)


def causal_atol(isa: str, dtype: torch.dtype, values: Sequence[Tensor], atol: float = 2e-6) -> float:
    """Where bfloat16 is multiplied, weights of a prompt's many queries are rounded to it, each by at most 2^-9: the sum
    is off by no more than that part of the largest value.
    """
    rounded = isa == "avx512bf16" and dtype == BF16
    return atol + (2.0**-9 * max(float(v.abs().max()) for v in values if v.numel()) if rounded else 0)


@dataclass
class Paged:
    """Pools with NaN in every slot that is no row's, and the same rows' keys and values in order."""

    shape: Shape
    rows: tuple[RowSlice, ...]
    k_pool: Tensor
    v_pool: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def make(cls, shape: Shape, new: list[int], local: list[int], page_size: int, dtype: torch.dtype) -> Paged:
        counts = [-(-length // page_size) for length in local]
        order, rows, start = iter(torch.randperm(sum(counts) + 3).tolist()), [], 0
        k_pool = torch.full((sum(counts) + 3, page_size, shape.kv_heads, shape.key_dim), torch.nan, dtype=dtype)
        v_pool = k_pool[..., : shape.value_dim]
        if not shape.latent:
            v_pool = k_pool.new_full((*k_pool.shape[:3], shape.value_dim), torch.nan)
        paged = cls(shape, (), k_pool, v_pool, [], [])
        for tokens, length, count in zip(new, local, counts, strict=True):
            pages = torch.tensor([next(order) for _ in range(count)], dtype=torch.int64)
            rows.append(RowSlice(start, start + tokens, length, length, pages))
            paged.fill(pages, length, page_size)
            start += tokens
        paged.rows = tuple(rows)
        return paged

    def fill(self, pages: Tensor, length: int, page_size: int) -> None:
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        k = torch.randn(length, *self.k_pool.shape[2:]).to(self.k_pool.dtype)
        v = k[..., : self.shape.value_dim]
        if not self.shape.latent:
            v = torch.randn(length, *self.v_pool.shape[2:]).to(self.v_pool.dtype)
            self.v_pool.flatten(0, 1)[slots] = v
        self.k_pool.flatten(0, 1)[slots] = k
        self.keys.append(k)
        self.values.append(v)

    def expected(self, q: Tensor, scale: float) -> Partial:
        out = torch.zeros(len(q), self.shape.heads, self.shape.value_dim)
        lse = torch.full((len(q), self.shape.heads), -torch.inf)
        for row, k, v in zip(self.rows, self.keys, self.values, strict=True):
            if row.local_len:
                own = slice(row.start, row.stop)
                out[own], lse[own] = exact(q[own], k, v, self.shape.groups, scale)
        return Partial(out, lse)


@pytest.mark.parametrize(
    ("q_dtype", "dtype", "page_size"),
    [(F32, F32, 4), (BF16, BF16, 16), (BF16, BF16, 1), (F32, BF16, 4), (BF16, F32, 1)],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_context(
    isa: str, threads: int, shape: Shape, q_dtype: torch.dtype, dtype: torch.dtype, page_size: int
) -> None:
    torch.manual_seed(page_size)
    paged = Paged.make(shape, [3, 1, 1, 2, 1, 21, 1], [0, 1, 17, 128, 129, 300, 64], page_size, dtype)
    q = torch.randn(33, shape.heads, shape.key_dim).to(q_dtype)  # the last three belong to no row
    scale = 0.5 * shape.key_dim**-0.5
    part = NativeBackend().context(q, paged.k_pool, paged.v_pool, paged.rows, scale)
    assert_equal(part, paged.expected(q, scale))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_long_context(isa: str, threads: int, shape: Shape, dtype: torch.dtype) -> None:
    """Long enough to be cut along the keys where there are threads."""
    torch.manual_seed(5)
    paged = Paged.make(shape, [1, 2], [5000, 4999], 16, dtype)
    q = torch.randn(3, shape.heads, shape.key_dim).to(dtype)
    scale = shape.key_dim**-0.5
    part = NativeBackend().context(q, paged.k_pool, paged.v_pool, paged.rows, scale)
    assert_equal(part, paged.expected(q, scale))
    assert_equal(part, TorchBackend().context(q, paged.k_pool, paged.v_pool, paged.rows, scale), atol=4e-6)


@pytest.mark.parametrize("q_to_kv", [[0], [0, 0, 0, 1, 1, 1], [1, 0, 1], [2, 2, 3], [0] * 40])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_new_tokens(isa: str, threads: int, q_to_kv: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(len(q_to_kv))
    new, dim, value_dim = [1, 7, 1, 130, 1, 260], 32, 24
    total, kv_heads = sum(new) + 2, max(q_to_kv) + 1
    q = torch.randn(total, len(q_to_kv), dim).to(dtype)
    k, v = torch.randn(total, kv_heads, dim).to(dtype), torch.randn(total, kv_heads, value_dim).to(dtype)
    v[-2:] = torch.nan
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    rows = tuple(RowSlice(a, b, 0, 0, NONE) for a, b in itertools.pairwise(starts))
    part = NativeBackend().new_tokens(q, k, v, q_to_kv, AttentionPlan(rows, NONE, NONE), 0.2)
    for a, b in itertools.pairwise(starts):
        own = Partial(part.out[a:b], part.lse[a:b])
        assert_equal(own, exact(q[a:b], k[a:b], v[a:b], q_to_kv, 0.2, causal=True))
    assert torch.equal(part.out[-2:], torch.zeros(2, len(q_to_kv), value_dim))
    assert torch.equal(part.lse[-2:], torch.full((2, len(q_to_kv)), -torch.inf))


@pytest.mark.parametrize("keys", [0, 1, 15, 700])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dense(isa: str, threads: int, keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(keys)
    q, q_to_kv = torch.randn(19, 5, 48).to(dtype), [1, 1, 0, 2, 1]
    k, v = torch.randn(keys, 3, 48).to(dtype), torch.randn(keys, 3, 16).to(dtype)
    part = NativeBackend().dense(q, k, v, q_to_kv, 0.2)
    if keys:
        assert_equal(part, exact(q, k, v, q_to_kv, 0.2))
    else:
        assert torch.equal(part.out, torch.zeros(19, 5, 16)) and torch.equal(part.lse, torch.full((19, 5), -torch.inf))


@dataclass
class Step:
    """Rows whose context and own tokens lie in pages; NaN in every slot that is no row's, and in what is written to."""

    paged: Paged
    rows: tuple[RowSlice, ...]
    q: Tensor
    groups: list[int]
    scale: float = 0.2

    @classmethod
    def make(
        cls,
        new: list[int],
        contexts: list[int],
        groups: list[int],
        dims: tuple[int, int],
        page_size: int,
        dtype: torch.dtype,
        q_dtype: torch.dtype | None = None,
        latent: bool = False,
        unused: int = 0,
    ) -> Step:
        """unused: queries of no row, behind the others."""
        shape = Shape(len(groups), max(groups) + 1, *dims, latent=latent)
        lengths = [context + own for context, own in zip(contexts, new, strict=True)]
        paged = Paged.make(shape, new, lengths, page_size, dtype)
        rows = tuple(
            dataclasses.replace(row, context_len=context, local_len=context)
            for row, context in zip(paged.rows, contexts, strict=True)
        )
        q = torch.randn(sum(new) + unused, len(groups), dims[0]).to(q_dtype or dtype)
        return cls(paged, rows, q, groups)

    def attend(self, threads: int = 1) -> Partial:
        tokens, heads = self.q.shape[:2]
        out, lse = (
            torch.full((tokens, heads, self.paged.shape.value_dim), torch.nan),
            torch.full((tokens, heads), torch.nan),
        )
        table, first = [], 0
        for row in self.rows:
            table.append([row.start, row.stop, row.context_len, first])
            first += len(row.pages)
        rows, pages = torch.tensor(table).view(-1, 4), torch.cat([row.pages for row in self.rows])
        pools, heads_of = (self.paged.k_pool, self.paged.v_pool), torch.tensor(self.groups)
        attention.paged(self.q, *pools, heads_of, rows, pages, self.scale, threads, out, lse)
        return Partial(out, lse)

    def by_backend(self) -> Tensor:
        pools = self.paged.k_pool, self.paged.v_pool
        return NativeBackend().paged(self.q, *pools, self.groups, self.rows, self.scale)

    def expected(self) -> Partial:
        out = torch.zeros(*self.q.shape[:2], self.paged.shape.value_dim)
        lse = torch.full(self.q.shape[:2], -torch.inf)
        for row, k, v in zip(self.rows, self.paged.keys, self.paged.values, strict=True):
            own = slice(row.start, row.stop)
            out[own], lse[own] = exact(self.q[own], k, v, self.groups, self.scale, causal=True)
        return Partial(out, lse)

    def poison(self, row: int, first: int, bad: float) -> None:
        """Keys and values of a row's tokens from `first` of its own ones on."""
        own, size = self.rows[row], self.paged.k_pool.shape[1]
        places = torch.arange(own.context_len + first, own.context_len + own.new_len)
        slots = own.pages[places // size] * size + places % size
        self.paged.k_pool.flatten(0, 1)[slots] = bad
        self.paged.v_pool.flatten(0, 1)[slots] = -bad


NEW = [1, 1, 7, 1, 40, 1, 3, 1]
CONTEXTS = [5, 0, 0, 130, 17, 1, 64, 15]
"""Of prefills, chunks and decodes; the second is a single key."""


@functools.cache
def paged_cases(q_dtype: torch.dtype, dtype: torch.dtype, page_size: int) -> list[tuple[Step, Partial]]:
    """With what is expected of them, for all instruction sets."""
    torch.manual_seed(page_size)
    steps = [
        Step.make(NEW, CONTEXTS, groups, dims, page_size, dtype, q_dtype, unused=2)
        for groups, dims in [
            ([0], (8, 8)),
            ([0, 1, 1], (64, 64)),
            ([1, 0, 1], (24, 40)),
            ([2, 2, 3], (72, 56)),
            ([h // 3 for h in range(9)], (64, 64)),
            ([0] * 13, (16, 8)),
            ([0, 0, 2], (64, 64)),
            ([h // 26 for h in range(130)], (16, 8)),
        ]
    ]
    return [(step, step.expected()) for step in steps]


@pytest.mark.parametrize(
    ("q_dtype", "dtype", "page_size"),
    [(F32, F32, 4), (BF16, BF16, 16), (BF16, BF16, 1), (F32, BF16, 4), (BF16, F32, 1)],
)
def test_paged(isa: str, q_dtype: torch.dtype, dtype: torch.dtype, page_size: int) -> None:
    for step, expected in paged_cases(q_dtype, dtype, page_size):
        for threads in (1, 2):
            assert_equal(step.attend(threads), expected)


@functools.cache
def latent_case(dtype: torch.dtype) -> tuple[Step, Partial]:
    torch.manual_seed(1)
    step = Step.make([1, 5, 1], [40, 13, 0], [0] * 16, (576, 512), 16, dtype, latent=True)
    step.scale = 576**-0.5
    return step, step.expected()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_latents(isa: str, threads: int, dtype: torch.dtype) -> None:
    step, expected = latent_case(dtype)
    part = step.attend(threads)
    assert_equal(part, expected, causal_atol(isa, dtype, step.paged.values))
    assert torch.equal(step.by_backend(), part.out)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_equals_both_passes(isa: str, threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    new, contexts = [1, 30, 1, 1, 150], [300, 0, 7, 0, 33]
    step = Step.make(new, contexts, [h // 3 for h in range(9)], (64, 48), 16, dtype)
    backend, keys, values = NativeBackend(), step.paged.keys, step.paged.values
    k, v = (torch.cat([x[-own:] for x, own in zip(all_of, new, strict=True)]) for all_of in (keys, values))
    before = backend.context(step.q, step.paged.k_pool, step.paged.v_pool, step.rows, step.scale)
    among = backend.new_tokens(step.q, k, v, step.groups, AttentionPlan(step.rows, NONE, NONE), step.scale)
    found = step.attend(threads)
    assert_equal(found, merge(before, among), causal_atol(isa, dtype, values))
    assert torch.equal(step.by_backend(), found.out)


@functools.cache
def long_cases(dtype: torch.dtype) -> list[tuple[Step, Partial]]:
    torch.manual_seed(3)
    lengths = [([1], [3000]), ([1, 1], [2999, 3]), ([400, 1], [0, 900]), ([3, 130], [1000, 250])]
    steps = [
        Step.make(new, contexts, groups, (64, 64), 16, dtype)
        for groups in ([0], [0, 1, 1])
        for new, contexts in lengths
    ]
    return [(step, step.expected()) for step in steps]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_long_context(isa: str, dtype: torch.dtype) -> None:
    """Keys are cut where there are threads: of one query, and of blocks whose first queries see none of the last."""
    for step, expected in long_cases(dtype):
        for threads in (1, 2):
            assert_equal(step.attend(threads), expected, causal_atol(isa, dtype, step.paged.values, atol=4e-6))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_gives_the_same_bits_again(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    step = Step.make([1, 200, 1], [3000, 100, 2999], [0, 0, 1], (64, 64), 16, dtype)
    first = step.attend(2)
    for _ in range(10):
        again = step.attend(2)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


@pytest.mark.parametrize("q_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_one_key(isa: str, q_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """The value itself, whatever it holds."""
    torch.manual_seed(5)
    for groups, dims in [([0], (8, 8)), ([0, 1, 1], (24, 40)), ([2, 0, 2], (72, 56)), ([0] * 9, (128, 16))]:
        for page_size in (1, 4, 16):
            step = Step.make([1] * 5, [0] * 5, groups, dims, page_size, dtype, q_dtype, unused=1)
            for row, v in zip(step.rows[:2], step.paged.values, strict=False):
                v[0, 0, 3:5] = torch.tensor([torch.nan, torch.inf])
                step.paged.v_pool[row.pages[0], 0] = v[0]
            found, expected = step.attend(), step.expected()
            values = torch.stack([v[0, groups].float() for v in step.paged.values])
            torch.testing.assert_close(found.out[:5], values, atol=0, rtol=0, equal_nan=True)
            torch.testing.assert_close(found.lse, expected.lse, atol=2e-6, rtol=2e-6)
            assert not found.out[5].any()


@pytest.mark.parametrize("bad", [100.0, torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_later_tokens_and_other_rows_are_not_read(isa: str, dtype: torch.dtype, bad: float) -> None:
    torch.manual_seed(6)
    for groups, threads in itertools.product(([0], [0, 1, 1]), (1, 2)):
        step = Step.make([1, 400, 1, 5], [9, 150, 0, 1], groups, (40, 40), 16, dtype)
        before, poisoned = step.attend(threads), step.rows[1]
        for first in (399, 257, 0):
            step.poison(1, first, bad)
            after = step.attend(threads)
            for kept in (slice(0, poisoned.start + first), slice(poisoned.stop, None)):
                assert torch.equal(before.out[kept], after.out[kept])
                assert torch.equal(before.lse[kept], after.lse[kept])
            if bad != bad:
                assert after.out[poisoned.start + first : poisoned.stop].isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_paged_unaligned_and_strided(isa: str, dtype: torch.dtype) -> None:
    """Queries that are part of a product, and pools that are part of larger ones."""
    torch.manual_seed(7)
    step = Step.make([1, 6, 1], [9, 20, 0], [0, 1, 1], (24, 40), 4, dtype)
    expected = step.attend()
    product = torch.full((8, 5, 30), torch.nan, dtype=dtype)
    product[:, 1:4, 3:27] = step.q
    step.q = product[:, 1:4, 3:27]
    for name in ("k_pool", "v_pool"):
        pool = getattr(step.paged, name)
        pages, size, heads, dim = pool.shape
        larger = torch.full((heads + 1, pages + 1, size + 2, dim + 3), torch.nan, dtype=dtype)
        view = larger[1:, 1:, 1 : size + 1, 1 : dim + 1].permute(1, 2, 0, 3)
        view[:] = pool
        setattr(step.paged, name, view)
    found = step.attend()
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_paged_other_sizes_take_the_torch_backend(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    sizes = [(8, 8)] if dtype == torch.float16 else [(12, 12), (16, 20), (12, 8)]
    for dims in sizes:
        for groups in ([0, 1, 1], [1, 1], [0, 0, 1, 1]):
            step = Step.make([1, 6, 1, 9], [9, 0, 0, 20], groups, dims, 4, dtype)
            torch.testing.assert_close(step.by_backend(), step.expected().out, atol=4e-6, rtol=4e-6)


def test_only_some_backends_are_fused() -> None:
    assert isinstance(NativeBackend(), FusedBackend)
    assert not isinstance(TorchBackend(), FusedBackend)


def test_paged_no_tokens_and_rows_without_any(isa: str) -> None:
    backend, pool = NativeBackend(), torch.randn(2, 4, 1, 8)
    assert backend.paged(torch.zeros(0, 2, 8), pool, pool, [0, 0], (), 1.0).shape == (0, 2, 8)
    step = Step.make([2, 0, 0, 1], [3, 0, 9, 2], [0, 0], (8, 8), 4, F32)
    assert_equal(step.attend(), step.expected())


def test_paged_a_row_without_tokens_behind_one_cached_writes_nothing(isa: str) -> None:
    step = Step.make([2, 0], [0, 1], [0, 0], (8, 8), 4, F32)
    rows, pages = torch.tensor([[0, 2, 0, 0], [2, 2, 1, 1]]), torch.cat([row.pages for row in step.rows])
    out, lse = torch.full((3, 2, 8), 7.0), torch.full((3, 2), 7.0)  # one token more than there are
    pools, heads = (step.paged.k_pool, step.paged.v_pool), torch.tensor(step.groups)
    attention.paged(step.q, *pools, heads, rows, pages, step.scale, 1, out[:2], lse[:2])
    assert_equal(Partial(out[:2], lse[:2]), step.expected())
    assert out[2].eq(7).all() and lse[2].eq(7).all()


@pytest.mark.parametrize("bad", [100.0, torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("heads", [1, 2, 9])
def test_a_later_token_is_not_read_by_an_earlier_one_nor_by_another_row(
    isa: str, heads: int, dtype: torch.dtype, bad: float
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, n, 40).to(dtype) for n in (heads, 1, 1))
    rows = (RowSlice(0, 200, 0, 0, NONE), RowSlice(200, 300, 0, 0, NONE))
    plan = AttentionPlan(rows, NONE, NONE)
    before = NativeBackend().new_tokens(q, k, v, [0] * heads, plan, 0.3)
    for first in (199, 150, 1):
        k[first:200] = bad
        v[first:200] = -bad
        after = NativeBackend().new_tokens(q, k, v, [0] * heads, plan, 0.3)
        for kept in (slice(0, first), slice(200, 300)):
            assert torch.equal(before.out[kept], after.out[kept])
            assert torch.equal(before.lse[kept], after.lse[kept])


def test_a_score_that_is_nan_is_not_hidden(isa: str) -> None:
    q, k, v = torch.randn(40, 1, 16), torch.randn(40, 1, 16), torch.randn(40, 1, 16)
    k[5] = torch.nan
    part = NativeBackend().dense(q, k, v, [0], 1.0)
    assert part.out.isnan().all() and part.lse.isnan().all()


def test_large_scores(isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 16) * 40, torch.randn(500, 2, 16) * 40, torch.randn(500, 2, 16)
    part = NativeBackend().dense(q, k, v, [0, 1], 1.0)
    torch.testing.assert_close(part.lse, exact(q, k, v, [0, 1], 1.0).lse.float())
    assert part.out.isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_unaligned_strided_and_overwritten(isa: str, dtype: torch.dtype) -> None:
    """Inputs that begin at an odd element, with gaps between tokens; outputs that hold NaN."""
    torch.manual_seed(1)

    def odd(*shape: int) -> Tensor:
        x = torch.randn(*shape[:-1], shape[-1] + 5).to(dtype)
        return x[..., 1 : 1 + shape[-1]]

    q, k, v = odd(7, 3, 24), odd(50, 1, 24), odd(50, 1, 40)
    out, lse = torch.full((7 * 3 * 40 + 1,), torch.nan)[1:].view(7, 3, 40), torch.full((7, 3), torch.nan)
    attention.dense(q, k, v, torch.zeros(3, dtype=torch.int64), 0.2, 1, out, lse)
    assert_equal(Partial(out, lse), exact(q, k, v, [0, 0, 0], 0.2))


def test_exp(isa: str) -> None:
    """Within 2 units in the last place."""
    x = torch.cat([torch.linspace(-87.33, 88, 200_001), torch.linspace(-1, 1, 100_001)])
    out = torch.full_like(x, torch.nan)
    attention.exp(x, out)
    expected = x.double().exp()
    unit = torch.nextafter(expected.float(), torch.tensor(torch.inf)).double() - expected.float().double()
    assert ((out.double() - expected).abs() / unit).max().item() <= 2
    special = torch.tensor([-torch.inf, -88.0, -1e30, torch.nan, 0.0, -0.0])
    out = torch.zeros(6)
    attention.exp(special, out)
    torch.testing.assert_close(out, torch.tensor([0, 0, 0, torch.nan, 1, 1]), equal_nan=True, atol=0, rtol=0)


def test_no_tokens_and_no_rows(isa: str) -> None:
    backend, pool = NativeBackend(), torch.zeros(2, 4, 1, 8)
    assert backend.context(torch.zeros(0, 2, 8), pool, pool, (), 1.0).out.shape == (0, 2, 8)
    part = backend.context(torch.zeros(3, 2, 8), pool, pool, (), 1.0)
    assert torch.equal(part.out, torch.zeros(3, 2, 8)) and torch.equal(part.lse, torch.full((3, 2), -torch.inf))


def test_other_sizes_take_the_torch_backend() -> None:
    q, k, v = torch.randn(3, 1, 12), torch.randn(5, 1, 12), torch.randn(5, 1, 12)
    assert_equal(NativeBackend().dense(q, k, v, [0], 0.3), exact(q, k, v, [0], 0.3))


def test_wrong_arguments_are_refused() -> None:
    q, pool, heads = torch.zeros(2, 1, 8), torch.zeros(3, 4, 1, 8), torch.zeros(1, dtype=torch.int64)
    out, lse = torch.zeros(2, 1, 8), torch.zeros(2, 1)

    def call(rows: list[list[int]], pages: list[int], heads: Tensor = heads, k: Tensor = pool) -> None:
        attention.context(q, k, pool, heads, torch.tensor(rows), torch.tensor(pages), 1.0, 1, out, lse)

    call([[0, 2, 5, 0]], [2, 0])
    for wrong in (
        lambda: call([[0, 2, 5, 0]], [2]),
        lambda: call([[0, 2, 5, 0]], [2, 3]),
        lambda: call([[0, 2, 5, 0]], [-1, 0]),
        lambda: call([[0, 3, 5, 0]], [2, 0]),
        lambda: call([[0, 2, 5, 0]], [2, 0], heads=heads + 1),
        lambda: call([[0, 2, 5, 0]], [2, 0], k=pool.bfloat16()),
        lambda: call([[0, 2, 5, 0]], [2, 0], k=torch.zeros(3, 4, 1, 16)),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_paged_wrong_arguments_are_refused() -> None:
    q, pool, heads = torch.zeros(2, 1, 8), torch.zeros(3, 4, 1, 8), torch.zeros(1, dtype=torch.int64)

    def call(
        rows: Sequence[object],
        pages: list[int],
        heads: Tensor = heads,
        k: Tensor = pool,
        v: Tensor = pool,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        out = torch.zeros(2, 1, 8) if out is None else out
        lse = torch.zeros(2, 1) if lse is None else lse
        attention.paged(q, k, v, heads, torch.tensor(rows), torch.tensor(pages), 1.0, 1, out, lse)

    fine = [[0, 2, 5, 0]]
    call(fine, [2, 0])
    for wrong in (
        lambda: call(fine, [2]),
        lambda: call([[0, 2, 7, 0]], [2, 0]),  # room for the context, but not for the tokens
        lambda: call([[0, 2, 5, 1]], [2, 0]),
        lambda: call([[0, 2, 5, -1]], [2, 0]),
        lambda: call([[0, 2, 5, 2**63 - 1]], [2, 0]),
        lambda: call(fine, [2, 3]),
        lambda: call(fine, [-1, 0]),
        lambda: call([[0, 2, -1, 0]], [2, 0]),
        lambda: call([[0, 3, 5, 0]], [2, 0]),
        lambda: call([[-1, 2, 5, 0]], [2, 0]),
        lambda: call([[2, 0, 5, 0]], [2, 0]),
        lambda: call([[0, 2, 5]], [2, 0]),
        lambda: call([[0.0, 2, 5, 0]], [2, 0]),
        lambda: call(fine, [2, 0], heads=heads + 1),
        lambda: call(fine, [2, 0], heads=heads - 1),
        lambda: call(fine, [2, 0], heads=torch.zeros(2, dtype=torch.int64)),
        lambda: call(fine, [2, 0], k=pool.bfloat16()),
        lambda: call(fine, [2, 0], k=torch.zeros(3, 4, 1, 16)),
        lambda: call(fine, [2, 0], k=torch.zeros(3, 4, 8).unsqueeze(0)),
        lambda: call(fine, [2, 0], v=torch.zeros(3, 4, 2, 8)),
        lambda: call(fine, [2, 0], v=torch.zeros(3, 4, 1, 8, 2)[..., 0]),
        lambda: call(fine, [2, 0], k=torch.zeros(3, 0, 1, 8), v=torch.zeros(3, 0, 1, 8)),
        lambda: call(fine, [2, 0], out=torch.zeros(2, 1, 16)),
        lambda: call(fine, [2, 0], out=torch.zeros(2, 1, 8).bfloat16()),
        lambda: call(fine, [2, 0], lse=torch.zeros(1, 2)),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_the_environment_forces_an_instruction_set_or_names_the_possible_ones() -> None:
    code = "import torch; from dcprt_kernel import attention as a; x = torch.zeros(3); a.exp(x, x); print(x.tolist())"
    for name in (*possible_isas(), "sse9"):
        environment = {**os.environ, "DCPRT_KERNEL_ISA": name}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if name == "sse9":
            assert "can run generic" in done.stderr
        else:
            assert done.stdout.strip() == "[1.0, 1.0, 1.0]", done.stderr
