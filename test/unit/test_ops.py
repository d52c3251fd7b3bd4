"""Operators on torch, used where the kernels are not installed, agree with the native ones; memory for weights."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcprt import ops
from dcprt.attention.combine import a2a
from dcprt.attention.partial import Partial, merge
from dcprt.ops import Arena, HeadMatrix, Matrix

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = torch.nan, torch.inf

dtypes = pytest.mark.parametrize("dtype", [F32, BF16])
native = pytest.mark.skipif(not ops.NATIVE, reason="the kernels are not installed")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What `work` returns natively, if it can, and on torch."""
    found = work()
    with monkeypatch.context() as patched:
        patched.setattr(ops, "NATIVE", False)
        return found, work()


def assert_alike(pair: tuple[Tensor, Tensor], size: float = 1.0, dtype: torch.dtype | None = None) -> None:
    """Within the rounding of `dtype` or else their own; `size` is what was summed, where that is larger."""
    assert pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
    error = 2e-2 if BF16 in (dtype, pair[0].dtype) else 2e-6
    torch.testing.assert_close(pair[0].double(), pair[1].double(), rtol=error, atol=error * size, equal_nan=True)


def matrix(outs: int, ins: int, dtype: torch.dtype, bias: bool = True) -> Matrix:
    weight, added = (torch.randn(outs, ins) * ins**-0.5).to(dtype), torch.randn(outs).to(dtype)
    return Matrix(weight, added if bias else None)


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 193])
def test_product(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for (outs, ins), bias, wide in itertools.product([(1, 1), (5, 40), (50, 33)], (False, True), (False, True)):
        torch.manual_seed(outs)
        weight, added, x = (
            torch.randn(outs, ins).to(dtype),
            torch.randn(outs).to(dtype),
            torch.randn(rows, ins).to(dtype),
        )
        pair = both(lambda: Matrix(weight, added if bias else None)(x, F32 if wide else None), monkeypatch)  # noqa: B023
        assert pair[0].dtype == (F32 if wide else dtype)
        assert_alike(pair, ins)
        exact = F.linear(x.double(), weight.double(), added.double() if bias else None)
        assert_alike((pair[1], exact.to(pair[1].dtype)), ins)


@dtypes
def test_normed_and_gated(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, hidden, width, with_add in itertools.product((0, 1, 5, 195), (1, 24), (3, 16), (False, True)):

        def work(rows: int = rows, hidden: int = hidden, width: int = width, with_add: bool = with_add) -> list[Tensor]:
            torch.manual_seed(rows)
            up, down, norm = matrix(2 * width, hidden, dtype), matrix(7, width, dtype, bias=False), torch.randn(hidden)
            x, add = torch.randn(rows, hidden), torch.randn(rows, hidden) if with_add else None
            first, second = x.clone(), x.clone()
            product = up.normed(first, add, norm.to(dtype), 1e-5)
            mlp = up.gated(second, add, norm.to(dtype), 1e-5, down)
            total = x if add is None else x + add
            assert torch.equal(first, total) and torch.equal(second, total), "x becomes the sum"
            return [product, mlp]

        for pair in zip(*both(work, monkeypatch), strict=True):
            assert_alike(pair, 4, dtype)


@dtypes
def test_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 9).to(dtype)
    for ids in ([], [0], [36, 0, 5, 5], [-1, 37, 1 << 40, 3, -(1 << 62)]):
        index = torch.tensor(ids, dtype=torch.int64)
        found, fallback = both(lambda: Matrix(weight).rows(index), monkeypatch)  # noqa: B023
        assert found.dtype == F32 and torch.equal(found, fallback)
        expected = [weight[i].float() if 0 <= i < 37 else torch.zeros(9) for i in ids]
        assert torch.equal(found, torch.stack(expected) if ids else torch.zeros(0, 9))


def test_weights_may_be_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(12, 20), torch.randn(3, 12)
    assert_alike(both(lambda: Matrix(weight.T)(x), monkeypatch), 12)
    assert Matrix(weight.T).shape == (20, 12)


@dtypes
@pytest.mark.parametrize("out_dtype", [F32, BF16])
def test_a_product_for_each_head(dtype: torch.dtype, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that lie anywhere, into part of a larger tensor, for all heads and for some."""
    for rows, heads, outs, ins in ((0, 2, 3, 8), (1, 4, 20, 24), (7, 3, 5, 33)):
        weight, x = torch.randn(heads, ins, outs).to(dtype).transpose(1, 2), torch.randn(rows, heads, ins)

        def work(weight: Tensor = weight, x: Tensor = x, places: slice = slice(None)) -> Tensor:
            out = torch.full((rows, x[:, places].shape[1], outs + 1), NAN, dtype=out_dtype)  # noqa: B023
            HeadMatrix(weight)(x[:, places], out[..., 1:], places)
            assert out[..., 0].isnan().all()
            return out[..., 1:]

        found = both(work, monkeypatch)
        assert_alike(found, ins, dtype)
        exact = torch.einsum("rhi,hoi->rho", x.to(dtype).double(), weight.double()).to(out_dtype)
        assert_alike((found[0], exact), ins)
        assert torch.equal(work(places=slice(1, 3)), found[0][:, 1:3])


@native
def test_a_packed_matrix_does_not_hold_the_weights_given() -> None:
    weight, x = torch.randn(5, 8), torch.randn(2, 8)
    packed = Matrix(weight)
    before = packed(x)
    weight.fill_(NAN)
    assert torch.equal(packed(x), before)


@native
def test_other_types_are_not_packed() -> None:
    weight, x = torch.randn(5, 8).double(), torch.randn(2, 8).double()
    torch.testing.assert_close(Matrix(weight)(x), F.linear(x, weight))


@native
def test_gated_leaves_out_the_bias_of_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> Tensor:
        torch.manual_seed(0)
        return matrix(8, 6, F32).gated(torch.randn(2, 6), None, torch.ones(6), 1e-5, matrix(3, 4, F32))

    assert_alike(both(work, monkeypatch), 10)


@native
def test_rows_outside_are_zeros_whatever_the_first_row_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 4)
    weight[0, 1], weight[0, 2] = NAN, INF
    for found in both(lambda: Matrix(weight).rows(torch.tensor([-1, 3])), monkeypatch):
        assert torch.equal(found, torch.zeros(2, 4))


@native
def test_a_product_is_rounded_to_the_type_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(5, 8), torch.randn(2, 8)
    assert_alike(both(lambda: Matrix(weight)(x, BF16), monkeypatch), 8)


@native
def test_x_is_rounded_to_the_type_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(5, 8).bfloat16(), torch.randn(2, 8)
    assert_alike(both(lambda: Matrix(weight)(x), monkeypatch), 8)


@dtypes
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 33), (2, 3, 16), (9,)], ids=str)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape[-1]).to(dtype)
    for x in (
        torch.randn(shape) * 30,
        torch.randn(*shape[:-1], shape[-1] + 3)[..., 1 : shape[-1] + 1],
        torch.zeros(shape),
    ):
        assert_alike(both(lambda: ops.rms_norm(x, weight, 1e-5), monkeypatch))  # noqa: B023
    assert_alike(both(lambda: ops.rms_norm(x.bfloat16(), weight, 1e-5), monkeypatch))
    if len(shape) != 2:
        return
    x, y = torch.randn(shape), torch.randn(shape)
    for add in (None, y):
        total = x if add is None else x + add

        def work(add: Tensor | None = add, total: Tensor = total) -> Tensor:
            changed = x.clone()
            out = ops.add_rms_norm(changed, add, weight, 1e-5)
            assert torch.equal(changed, total)
            return out

        assert_alike(both(work, monkeypatch))


@dtypes
@pytest.mark.parametrize(("rows", "n"), [(0, 4), (1, 1), (3, 17), (40, 64)])
def test_silu_mul(rows: int, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(n)
    x = (torch.randn(rows, 2 * n) * 4).to(dtype)
    assert_alike(both(lambda: ops.silu_mul(x), monkeypatch))


@dtypes
def test_rotate(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    for tokens, heads, dim, half in [(0, 1, 8, 4), (1, 1, 2, 1), (5, 3, 16, 8), (9, 2, 20, 6)]:
        product = torch.randn(tokens, (heads + 2) * dim).to(dtype)
        angle = torch.randn(tokens, 1, half) * 10

        def work(
            product: Tensor = product, angle: Tensor = angle, shape: tuple[int, ...] = (tokens, -1, dim)
        ) -> Tensor:
            own = product.clone()
            x = own.unflatten(1, (-1, shape[2]))[:, 1:-1]
            assert ops.rotate(x, angle.cos(), angle.sin()) is x
            return own

        assert_alike(both(work, monkeypatch))


def test_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 300)
    x[1] = -INF
    x[2, 7] = x[2, 299] = 50
    x[3, 4] = NAN
    for found, fallback in zip(*both(lambda: ops.argmax(x), monkeypatch), strict=True):
        torch.testing.assert_close(found, fallback, atol=0, rtol=0, equal_nan=True)


@dtypes
def test_store(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    product = torch.randn(9, 6, 5)
    layouts = [product[:, 1:3].to(dtype), product[:, 1:3].to(dtype).mT.contiguous().mT, product[:, 1:3]]
    for rows, count in itertools.product(layouts, (0, 1, 7)):
        taken, slots = torch.randperm(9)[:count], torch.randperm(12)[:count]

        def work(rows: Tensor = rows, taken: Tensor = taken, slots: Tensor = slots) -> Tensor:
            pool = torch.full((3, 4, 2, 5), -7.0, dtype=dtype)
            ops.store(pool, rows, taken, slots)
            return pool

        found, fallback = both(work, monkeypatch)
        assert torch.equal(found, fallback)
        expected = torch.full((12, 2, 5), -7.0, dtype=dtype)
        expected[slots] = rows[taken].to(dtype)
        assert torch.equal(found.flatten(0, 1), expected)


def test_page_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> list[Tensor]:
        pools = [torch.arange(24.0).view(2, 3, 4), torch.arange(24.0).view(2, 3, 4).to(torch.bfloat16)]
        copies = ops.PageCopies(pools)
        copies(0, 1, 2)
        copies(0, 1, 0)
        return pools

    for native, by_torch in zip(*both(work, monkeypatch), strict=True):
        assert torch.equal(native, by_torch)
        assert torch.equal(native[1, :2], native[0, :2])
        assert not torch.equal(native[1, 2], native[0, 2])


def parts(tokens: int, heads: int, dim: int) -> tuple[Partial, Partial]:
    """A fifth of each is empty and holds NaN; some tokens are empty in both."""
    made = []
    for _ in range(2):
        out, lse = torch.randn(tokens, heads, dim), torch.randn(tokens, heads) * 4
        empty = torch.rand(tokens, heads) < 0.2
        empty[: tokens // 4] = True
        out[empty], lse[empty] = NAN, -INF
        made.append(Partial(out, lse))
    return made[0], made[1]


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 1), (9, 6, 17), (40, 4, 64)], ids=str)
def test_merge(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    a, b = parts(*shape)
    for pair in zip(*both(lambda: merge(a, b), monkeypatch), strict=True):
        assert_alike(pair)
    turned = Partial(b.out.mT.contiguous().mT, b.lse.T.contiguous().T)
    for pair in zip(*both(lambda: merge(a, turned), monkeypatch), strict=True):
        assert_alike(pair)


class Echo:
    """A group in which every rank has the same; this one is the last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = size - 1

    def all_to_all(self, x: Tensor) -> Tensor:
        assert x.is_contiguous() and len(x) == self.size
        return x[self.rank :].expand_as(x).contiguous()


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_exchanged_parts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many times the same keys change nothing but the lse."""
    torch.manual_seed(5)
    local, own = parts(9, 6, 17)[0], 6 // ranks
    for pair in zip(*both(lambda: a2a(local, Echo(ranks)), monkeypatch), strict=True):
        assert_alike(pair)
        assert pair[0].is_contiguous() and pair[1].is_contiguous()
    found = a2a(local, Echo(ranks))
    empty = (local.lse == -INF).unsqueeze(-1)
    torch.testing.assert_close(found.out, torch.where(empty, 0.0, local.out)[:, -own:], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.lse, local.lse[:, -own:] + torch.tensor(float(ranks)).log())


def ranges(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, tuple[float, float]]:
    """In float64, where the range of each token that is left begins and ends."""
    values, order = logits.double().sort(descending=True, stable=True)
    weights = ((values - values[0]) / temperature).exp()
    weights = weights[: min(top_k or len(weights), max(int((weights >= min_p).sum()), 1))]
    sums = weights.cumsum(0)
    if top_p < 1:
        sums = sums[: int((sums < top_p * sums[-1]).sum()) + 1]
    ends = (sums / sums[-1]).tolist()
    return dict(zip(order.tolist(), itertools.pairwise([0.0, *ends]), strict=False))


@pytest.mark.parametrize("vocab", [1, 2, 17, 1000, 49152])
def test_draw(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike, but where what is drawn lies next to the end of a token's range. On torch, logits are rounded when divided
    by the temperature, so the ranges are less exact there.
    """
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 3
    settings = list(itertools.product([1e-5, 0.2, 1.0, 3.0, 1e4], [0, 1, 5], [1.0, 0.9, 0.2], [0.0, 0.03, 1.0]))
    differing = 0
    for setting in (settings[i] for i in torch.randperm(len(settings))[: 200 if vocab <= 1000 else 25].tolist()):
        near = 1e-6 + 2.0**-23 * logits.abs().max().item() / setting[0] if setting[0] < 1 else 1e-6
        for drawn in (0.0, 1 - 2.0**-53, *torch.rand(2, dtype=torch.float64).tolist()):
            pair = both(lambda: ops.draw(logits, *setting, drawn), monkeypatch)  # noqa: B023
            if pair[0] != pair[1]:
                differing += 1
                left = ranges(logits, *setting)
                assert all(left[token][0] - near <= drawn <= left[token][1] + near for token in pair), (setting, drawn)
    assert differing <= 2


def test_draw_of_equal_and_impossible_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    for logits in ([0.0] * 40, [1.0, 2.0, 2.0, -INF, 2.0, 1.0], [-INF, -INF, 3.0], [-INF, 0.5, -INF, 0.5]):
        for setting in itertools.product([1e-3, 1.0, 1e3], [0, 2], [1.0, 0.6], [0.0, 0.5]):
            for drawn in (0.0, 0.21, 0.49, 0.76, 1 - 2.0**-53):
                pair = both(lambda: ops.draw(torch.tensor(logits), *setting, drawn), monkeypatch)  # noqa: B023
                assert pair[0] == pair[1] and logits[pair[0]] > -INF


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int64])
def test_arena_tensors_are_aligned_and_apart(dtype: torch.dtype) -> None:
    arena = Arena()
    shapes = [(3,), (), (5, 7), (1, 1, 1), (0, 9), (4096, 513), (33,), (Arena.CHUNK // dtype.itemsize + 1,), (2, 2)]
    tensors = [arena.empty(shape, dtype) for shape in shapes]
    for i, (x, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
        assert x.numel() == 0 or x.data_ptr() % 64 == 0
        x.fill_(i + 1)
    assert all((x == i + 1).all() for i, x in enumerate(tensors))
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors if x.numel())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_an_arena_takes_back_what_was_trimmed() -> None:
    arena = Arena()
    first = arena.empty((1000,), torch.uint8)
    second = arena.empty((1000,), torch.uint8)
    begin, kept = second.data_ptr(), arena.trim(second, 65)
    assert (len(kept), kept.data_ptr()) == (65, begin)
    third = arena.empty((8,), torch.float32)
    assert third.data_ptr() == begin + 128
    assert arena.trim(third, 0).numel() == 0
    assert arena.empty((8,), torch.float32).data_ptr() == begin + 128
    assert first.data_ptr() + 1024 == begin


@native
@pytest.mark.parametrize("in_arena", [False, True])
def test_large_bfloat16_matrices_are_coded_without_a_trace(in_arena: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    weight, bias = torch.randn(512, 200).to(torch.bfloat16), torch.randn(512).to(torch.bfloat16)
    norm, down = torch.ones(200, dtype=torch.bfloat16), torch.randn(200, 256).to(torch.bfloat16)
    found, sizes = [], []
    for least in (0, 1 << 30):
        monkeypatch.setattr(Matrix, "CODED_BYTES", least)
        arena = Arena() if in_arena else None
        wide, narrow = Matrix(weight, bias, arena), Matrix(down, None, arena)
        small = Matrix(weight[:1, :1], None, arena)
        x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
        products = wide(x), wide.normed(x.clone(), None, norm, 1e-5), wide.gated(x.clone(), None, norm, 1e-5, narrow)
        found.append([*products, small(x[:, :1]), wide.rows(torch.tensor([0, 511, 512, -1, 77]))])
        sizes.append(wide._data.nbytes)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert sizes[0] < 0.8 * sizes[1]


def test_an_arena_lives_as_long_as_its_tensors() -> None:
    arena = Arena()
    kept, other = arena.empty((100_000,), F32), arena.empty((10,), F32)
    kept.fill_(3)
    arena.empty((Arena.CHUNK,), torch.uint8)  # the next piece of memory
    del arena, other
    gc.collect()
    torch.full((Arena.CHUNK,), 9, dtype=torch.uint8)
    assert (kept == 3).all()


@dtypes
def test_a_matrix_in_an_arena(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = [torch.randn(20, 11).to(dtype), torch.randn(5, 11).to(dtype)], torch.randn(3, 11).to(dtype)

    def work() -> list[Tensor]:
        arena = Arena()
        return [Matrix(weight, arena=arena)(x) for weight in weights]

    for weight, found, fallback in zip(weights, *both(work, monkeypatch), strict=True):
        assert_alike((found, fallback), 11)
        assert torch.equal(found, Matrix(weight)(x))
