"""Native attention against its definition and the torch backend, for every instruction set and number of threads."""

from __future__ import annotations

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

from dcprt.attention.native_backend import NativeBackend
from dcprt.attention.partial import Partial
from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.torch_backend import TorchBackend
from dcprt_kernel import attention
from dcprt_kernel.linear import forced_isa, possible_isas

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


@pytest.fixture(params=possible_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def exact(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[int], scale: float, causal: bool = False) -> Partial:
    """Attention of q [tokens, heads, dim] to k, v [keys, kv_heads, dim] in float64."""
    index = torch.tensor(groups, dtype=torch.int64)
    keys, values = k[:, index].double(), v[:, index].double()
    scores = torch.einsum("thd,khd->htk", q.double(), keys) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("htk,khd->thd", scores.softmax(-1), values)
    return Partial(out, scores.logsumexp(-1).T)


def assert_equal(part: Partial, expected: Partial, atol: float = 2e-6) -> None:
    torch.testing.assert_close(part.out, expected.out.float(), atol=atol, rtol=2e-6)
    torch.testing.assert_close(part.lse, expected.lse.float(), atol=atol, rtol=2e-6)


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


def test_a_later_token_is_not_read_by_an_earlier_one_nor_by_another_row(isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(300, 2, 16), torch.randn(300, 1, 16), torch.randn(300, 1, 16)
    rows = (RowSlice(0, 200, 0, 0, NONE), RowSlice(200, 300, 0, 0, NONE))
    plan = AttentionPlan(rows, NONE, NONE)
    before = NativeBackend().new_tokens(q, k, v, [0, 0], plan, 0.3)
    k[150:200] = 100
    v[150:200] = -7
    after = NativeBackend().new_tokens(q, k, v, [0, 0], plan, 0.3)
    for kept in (slice(0, 150), slice(200, 300)):
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
