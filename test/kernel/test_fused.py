"""A norm and the products behind it: the bits of the single steps, and float64, for every instruction set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

pytest.importorskip("dcprt_kernel.fused")

import torch
import torch.nn.functional as F
from torch import Tensor

from dcprt_kernel.elementwise import rms_norm, silu_mul
from dcprt_kernel.fused import norm_gated_mlp, norm_linear
from dcprt_kernel.linear import linear

from .tensors import packed, unaligned

F32, BF16 = torch.float32, torch.bfloat16
NAN = torch.nan
SIZES = [(1, 1, 1), (2, 3, 16), (15, 17, 1), (16, 32, 15), (17, 5, 33), (64, 50, 48), (129, 70, 20)]
"""hidden, outs of the first matrix, outs of the second."""
ROWS = [1, 3, 17, 385]
EPS = 1e-5

dtypes = pytest.mark.parametrize("dtype", [F32, BF16])


pytestmark = pytest.mark.usefixtures("isa")


@dataclass
class Case:
    """x and the sum to it, the norm's weight, and both matrices with the bias of the first."""

    x: Tensor
    add: Tensor | None
    norm: Tensor
    first: Tensor
    bias: Tensor | None
    down: Tensor

    @classmethod
    def make(cls, rows: int, hidden: int, outs: int, last: int, dtype: torch.dtype, full: bool = True) -> Case:
        """outs: of each half of the first matrix. With `full`, there is something to add, and a bias."""
        return cls(
            unaligned(torch.randn(rows, hidden) * 3),
            unaligned(torch.randn(rows, hidden)) if full else None,
            unaligned((torch.randn(hidden) + 1).to(dtype)),
            (torch.randn(2 * outs, hidden) * max(hidden, 1) ** -0.5).to(dtype),
            unaligned(torch.randn(2 * outs).to(dtype)) if full else None,
            (torch.randn(last, outs) * outs**-0.5).to(dtype),
        )

    @property
    def total(self) -> Tensor:
        return self.x if self.add is None else self.x + self.add

    def row(self, i: int) -> Case:
        add = None if self.add is None else self.add[i : i + 1]
        return Case(self.x[i : i + 1], add, self.norm, self.first, self.bias, self.down)

    def product(self, threads: int = 1) -> Tensor:
        """The first matrix; checks what becomes of x."""
        x, out = unaligned(self.x), torch.full((len(self.x), len(self.first)), NAN, dtype=self.norm.dtype)
        norm_linear(x, self.add, self.norm, EPS, packed(self.first), self.bias, out, threads)
        torch.testing.assert_close(x, self.total, atol=0, rtol=0, equal_nan=True)
        return out

    def mlp(self, threads: int = 1) -> Tensor:
        x, out, width = unaligned(self.x), torch.full((len(self.x), len(self.down)), NAN), self.down.shape[1]
        matrices = packed(self.first), self.bias, packed(self.down)
        norm_gated_mlp(x, self.add, self.norm, EPS, *matrices, width, out, threads)
        torch.testing.assert_close(x, self.total, atol=0, rtol=0, equal_nan=True)
        return out

    def steps(self) -> tuple[Tensor, Tensor]:
        """Results of `product` and `mlp`, one kernel after another."""
        rows, dtype = len(self.x), self.norm.dtype
        normed, both = torch.empty(self.x.shape, dtype=dtype), torch.empty(rows, len(self.first), dtype=dtype)
        gated, out = torch.empty(rows, self.down.shape[1], dtype=dtype), torch.empty(rows, len(self.down))
        rms_norm(self.total, self.norm, EPS, normed)
        linear(normed, packed(self.first), self.bias, both)
        silu_mul(both, gated)
        linear(gated, packed(self.down), None, out)
        return both, out

    def exact(self) -> tuple[Tensor, Tensor]:
        """The same in float64, never rounded."""
        normed = F.rms_norm(self.total.double(), self.x.shape[1:], self.norm.double(), EPS)
        both = F.linear(normed, self.first.double(), None if self.bias is None else self.bias.double())
        gate, up = both.chunk(2, -1)
        return both, F.linear(F.silu(gate) * up, self.down.double())


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - exact).abs().max().item()
    assert error <= (3e-2 if dtype == BF16 else 1e-5) * max(1.0, exact.abs().max().item())


@dtypes
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(size))
    for i, rows in enumerate(ROWS):
        case = Case.make(rows, *size, dtype, full=i % 2 == 0)
        both, out = case.steps()
        for threads in (1, 2):
            assert torch.equal(case.product(threads), both)
            assert torch.equal(case.mlp(threads), out)
        exact = case.exact()
        close(both, exact[0], dtype)
        close(out, exact[1], dtype)


@dtypes
def test_each_part_is_optional(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for with_add in (False, True):
        for with_bias in (False, True):
            case = Case.make(5, 24, 18, 24, dtype)
            case.add = case.add if with_add else None
            case.bias = case.bias if with_bias else None
            both, out = case.steps()
            assert torch.equal(case.product(), both) and torch.equal(case.mlp(), out)
            close(out, case.exact()[1], dtype)


@dtypes
def test_a_row_does_not_depend_on_those_beside_it_nor_on_nan_in_them(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    case = Case.make(200, 33, 20, 17, dtype)
    case.x[3, 5] = case.x[195, 0] = NAN
    case.x[7, 2] = torch.inf
    both, out = case.product(2), case.mlp(2)
    for i in (0, 1, 2, 4, 8, 191, 192, 199):
        assert torch.equal(case.row(i).product()[0], both[i]) and torch.equal(case.row(i).mlp()[0], out[i])
        assert both[i].isfinite().all() and out[i].isfinite().all()
    for i in (3, 7, 195):
        assert both[i].isnan().all() and out[i].isnan().all()


@dtypes
def test_a_norm_of_zeros(dtype: torch.dtype) -> None:
    case = Case.make(2, 16, 4, 3, dtype, full=False)
    case.x[0] = 0
    assert not case.product()[0].any() and not case.mlp()[0].any()


def test_empty_inputs() -> None:
    for rows, hidden, outs, last in ((0, 5, 3, 2), (2, 5, 0, 2), (2, 5, 3, 0), (0, 0, 0, 0)):
        case = Case.make(rows, hidden, outs, last, F32) if outs else Case.make(rows, hidden, 1, last, F32)
        if not outs:
            case.first, case.bias, case.down = case.first[:0], None, case.down[:, :0]
        assert case.product(2).shape == (rows, 2 * outs)
        assert case.mlp(2).shape == (rows, last)
        assert outs or not case.mlp(2).any(), "the sum over nothing is 0"


def test_several_callers_at_once() -> None:
    torch.manual_seed(3)
    cases = [Case.make(rows, 40, 30, 25, dtype) for rows in (1, 50, 7, 200) for dtype in (F32, BF16)] * 3
    expected = [case.mlp() for case in cases]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: case.mlp(2), cases))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    x, norm, bias, out = torch.ones(2, 4), torch.ones(4), torch.ones(6), torch.empty(2, 6)
    first, down, last = packed(torch.ones(6, 4)), packed(torch.ones(5, 3)), torch.empty(2, 5)
    product = {"x": x, "add": x.clone(), "norm": norm, "eps": EPS, "matrix": first, "bias": bias, "out": out}
    mlp = {**product, "gate_up": first, "down": down, "width": 3, "out": last}
    del mlp["matrix"]
    norm_linear(**product)
    norm_gated_mlp(**mlp)
    common = [
        {"x": x.bfloat16()},
        {"x": torch.ones(4, 2).T},
        {"x": torch.ones(8)},
        {"x": torch.ones(3, 4)},
        {"add": torch.ones(2, 3)},
        {"add": torch.ones(4, 2)},
        {"add": torch.ones(1, 4)},
        {"add": x.bfloat16()},
        {"norm": torch.ones(3)},
        {"norm": torch.ones(1, 4)},
        {"norm": norm.bfloat16()},
        {"norm": norm.double()},
        {"bias": torch.ones(5)},
        {"bias": torch.ones(6, 1)},
        {"bias": bias.bfloat16()},
        {"bias": torch.ones(12)[::2]},
        {"out": torch.empty(3, 6)},
        {"out": torch.empty(2, 60)},
        {"out": torch.empty(2, 6).bfloat16()},
        {"out": torch.empty(6, 2).T},
    ]
    for wrong in (*common, {"matrix": packed(torch.ones(6, 5))}, {"matrix": first.bfloat16()}):
        with pytest.raises(ValueError):
            norm_linear(**{**product, **wrong})
    for wrong in (
        *common,
        {"gate_up": packed(torch.ones(40, 4))},
        {"down": packed(torch.ones(5, 4))},
        {"down": packed(torch.ones(5, 3).bfloat16())},
        {"width": 10},
        {"width": -3},
    ):
        with pytest.raises(ValueError):
            norm_gated_mlp(**{**mlp, **wrong})
