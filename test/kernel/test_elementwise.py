"""Norms, SiLU, rotation and the greatest logit, natively, against float64 or torch, for every instruction set."""

from __future__ import annotations

import pytest

pytest.importorskip("dcprt_kernel.elementwise")

import torch
import torch.nn.functional as F
from torch import Tensor

from dcprt_kernel.elementwise import argmax, rms_norm, rotate, silu_mul

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]
SIZES = [1, 2, 3, 15, 16, 17, 33, 64, 127, 576, 599]


pytestmark = pytest.mark.usefixtures("isa")


def close(found: Tensor, exact: Tensor, rounding: float = 2e-6) -> None:
    """Within float32 errors of the float64 values, and the rounding of bfloat16 where that is the type."""
    relative = 2.0**-8 + rounding if found.dtype == BF16 else rounding
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=rounding)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_rms_norm(n: int, weight_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    for rows in (1, 2, 5):
        x = (torch.randn(rows + 1, n + 3) * 20).to(x_dtype)[1:, 1 : n + 1]
        weight = torch.randn(n + 1).to(weight_dtype)[1:]
        out = torch.full((rows, n), torch.nan, dtype=weight_dtype)
        rms_norm(x, weight, 1e-5, out)
        close(out, F.rms_norm(x.double(), (n,), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_of_a_sum(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    for rows in (1, 4, 300):
        x, y, weight = torch.randn(rows, n), torch.randn(rows, n), torch.randn(n).to(dtype)
        total = x + y
        for threads in (1, 2):
            summed, out = x.clone(), torch.full((rows, n), torch.nan, dtype=dtype)
            rms_norm(summed, weight, 1e-6, out, y, threads)
            assert torch.equal(summed, total)
            close(out, F.rms_norm(total.double(), (n,), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_silu_mul(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    for rows in (1, 3, 130):
        x = (torch.randn(rows, 2 * n + 1) * 5).to(dtype)[:, 1:]
        for threads in (1, 2):
            out = torch.full((rows, n), torch.nan, dtype=dtype)
            silu_mul(x, out, threads)
            close(out, F.silu(x[:, :n].double()) * x[:, n:].double())


def test_silu_over_its_whole_range() -> None:
    gate = torch.cat([torch.linspace(-200, 200, 40001), torch.tensor([0.0, -0.0, 3e38, -3e38])])
    out = torch.empty(1, len(gate))
    silu_mul(torch.cat([gate, torch.ones_like(gate)])[None], out)
    torch.testing.assert_close(out[0].double(), F.silu(gate.double()), rtol=1e-6, atol=1e-34)


def test_silu_keeps_nan() -> None:
    out = torch.zeros(1, 40)
    x = torch.ones(1, 80)
    x[0, 3] = x[0, 39] = x[0, 50] = torch.nan
    silu_mul(x, out)
    assert out[0].isnan().nonzero().flatten().tolist() == [3, 10, 39]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (64, 16), (10, 5), (34, 17), (7, 1), (128, 64)])
def test_rotate_in_place(dim: int, half: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    for tokens, heads in ((1, 3), (5, 1), (70, 12)):
        product = torch.randn(tokens, (heads + 4) * dim).to(dtype)
        angle = torch.randn(tokens, 1, half) * 10
        before = product.clone()
        x = product.view(tokens, heads + 4, dim)[:, 1 : heads + 1]
        a, b = x[..., :half].double(), x[..., half : 2 * half].double()
        cos, sin = angle.cos(), angle.sin()
        first, second = a * cos - b * sin, b * cos + a * sin
        rotate(x, cos, sin, 2)
        close(x[..., :half], first)
        close(x[..., half : 2 * half], second)
        x[..., : 2 * half] = before.view_as(product.view(tokens, heads + 4, dim))[:, 1 : heads + 1, : 2 * half]
        assert torch.equal(product, before)


def test_rotate_heads_that_lie_apart() -> None:
    torch.manual_seed(0)
    x, angle = torch.randn(3, 6, 16), torch.randn(6, 1, 8)
    view = x.transpose(0, 1)
    expected = view.contiguous()
    rotate(expected, angle.cos(), angle.sin())
    rotate(view, angle.cos(), angle.sin())
    assert torch.equal(view, expected)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 1000, 1023, 1024, 1025, 3000, 49152])
def test_argmax(n: int) -> None:
    torch.manual_seed(n)
    x = torch.randn(6, n + 2)[:, 1 : n + 1]
    x[1] = -torch.inf
    x[2] = 1.0
    x[3, n // 2] = x[3, n - 1] = 9.0
    x[4, n - 1] = 20.0
    for threads in (1, 2):
        places, values = torch.full((6,), -1), torch.full((6,), torch.nan)
        argmax(x, places, values, threads)
        assert places.tolist() == [int((row == row.max()).nonzero()[0]) for row in x]
        assert torch.equal(values, x.amax(-1))


@pytest.mark.parametrize("place", [0, 5, 16, 1023, 1024, 2047, 2049])
def test_argmax_finds_the_first_nan(place: int) -> None:
    x = torch.randn(1, 2050)
    x[0, place] = torch.nan
    x[0, 2049] = torch.nan
    places, values = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    argmax(x, places, values)
    assert places.tolist() == [place]
    assert values.isnan().all()


def test_empty_inputs() -> None:
    rms_norm(torch.empty(0, 4), torch.ones(4), 1e-5, torch.empty(0, 4))
    silu_mul(torch.empty(0, 4), torch.empty(0, 2))
    rotate(torch.empty(0, 2, 4), torch.empty(0, 1, 2), torch.empty(0, 1, 2))
    argmax(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(0))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match="as long as a row"):
        rms_norm(x, torch.ones(3), 1e-5, torch.empty(2, 4))
    with pytest.raises(ValueError, match="float32"):
        rms_norm(x.bfloat16(), weight, 1e-5, torch.empty(2, 4), x)
    with pytest.raises(ValueError, match="half as wide"):
        silu_mul(x, torch.empty(2, 3))
    with pytest.raises(ValueError, match="dim / 2"):
        rotate(torch.ones(2, 1, 4), torch.ones(2, 1, 3), torch.ones(2, 1, 3))
    with pytest.raises(ValueError, match="no greatest"):
        argmax(torch.empty(2, 0), torch.empty(2, dtype=torch.int64), torch.empty(2))
