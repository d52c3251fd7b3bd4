"""Native products, against float64 products of the same inputs, for every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("dcprt_kernel.linear")

import torch
from torch import Tensor

from dcprt_kernel import linear as kernel
from dcprt_kernel.linear import PANEL, forced_isa, isa_in_use, pack, packed_shape, possible_isas

from .tensors import packed

F32, BF16 = torch.float32, torch.bfloat16
EPS = 2.0**-23


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, threads: int = 1) -> None:
    kernel.linear(x, packed(weight), bias, out, threads)


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = F32, threads: int = 1
) -> Tensor:
    """The sums are as good as float32 sums are, whatever their order; returns them."""
    rows, (outs, ins) = x.shape[0], weight.shape
    out = torch.full((rows, outs), torch.nan, dtype=out_dtype)
    linear(x, weight, bias, out, threads)
    rounded = x.to(weight.dtype).double()
    exact = rounded @ weight.double().T
    size = rounded.abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = size * EPS * (4 + ins / 8) + (exact.abs() * 2.0**-8 if out_dtype == BF16 else 0) + 1e-37
    assert ((out.double() - exact).abs() <= bound).all()
    return out


def random(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
@pytest.mark.parametrize("ins", [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 129, 255, 599, 600])
def test_odd_sizes(isa: str, ins: int, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(ins)
    for outs in (1, 2, 15, 16, 17, 47, 64, 130):
        for rows in (1, 2, 3, 5, 8, 17):
            check(random(rows, ins), random(outs, ins, dtype=weight_dtype))


@pytest.mark.parametrize("rows", range(1, 18))
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_every_number_of_rows(isa: str, rows: int, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    check(random(rows, 96, dtype=weight_dtype), random(37, 96, dtype=weight_dtype))


@pytest.mark.parametrize("x_dtype", [F32, BF16])
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("bias_dtype", [None, F32, BF16])
def test_types(
    isa: str,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> None:
    torch.manual_seed(1)
    for ins in (64, 45):
        bias = None if bias_dtype is None else random(21, dtype=bias_dtype)
        check(random(6, ins, dtype=x_dtype), random(21, ins, dtype=weight_dtype), bias, out_dtype)


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
@pytest.mark.parametrize("ins", [32, 37])
def test_views(isa: str, ins: int, weight_dtype: torch.dtype) -> None:
    """Rows further apart than they are long, beginning anywhere, with NaN between them."""
    torch.manual_seed(ins)
    for start in (1, 3):
        x = torch.full((5, ins + 8), torch.nan, dtype=weight_dtype)
        weight = torch.full((11, ins + 5), torch.nan, dtype=weight_dtype)
        x[:, start : start + ins] = random(5, ins)
        weight[:, start : start + ins] = random(11, ins)
        check(x[1:, start : start + ins], weight[1:, start : start + ins])
        flat = random(4 * ins + start, dtype=weight_dtype)[start:]
        check(random(2, ins, dtype=weight_dtype), flat.view(4, ins))


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_threads_give_the_same_bits(isa: str, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for outs in (1500, 1501):
        x, weight = random(3, 300, dtype=weight_dtype), random(outs, 300, dtype=weight_dtype)
        one, data = check(x, weight), packed(weight)
        for threads in (2, 3):
            for _ in range(20):
                out = torch.full_like(one, torch.nan)
                kernel.linear(x, data, None, out, threads)
                assert torch.equal(out, one)


def test_several_callers_at_once(isa: str) -> None:
    torch.manual_seed(3)
    jobs = [(random(2, 256), random(1200, 256)) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: check(*job, threads=2), jobs))
    for out, job in zip(found, jobs, strict=True):
        assert torch.equal(out, check(*job))


def test_forked_child_has_threads_of_its_own() -> None:
    program = """
import os, torch
from dcprt_kernel.linear import linear, packed_shape
x, packed, out = torch.ones(1, 512), torch.ones(packed_shape(2048, 512, 4)), torch.empty(1, 2048)
linear(x, packed, None, out, 2)
child = os.fork()
out.zero_()
linear(x, packed, None, out, 2)
assert (out == 512).all()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_empty_inputs(isa: str) -> None:
    linear(torch.empty(0, 5), torch.ones(3, 5), None, torch.empty(0, 3))
    linear(torch.ones(2, 5), torch.empty(0, 5), None, torch.empty(2, 0))
    out = torch.full((2, 3), torch.nan)
    linear(torch.empty(2, 0), torch.empty(3, 0), torch.arange(3.0), out)
    assert torch.equal(out, torch.arange(3.0).expand(2, 3))


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_nan_and_infinity_stay_where_they_are(isa: str, weight_dtype: torch.dtype) -> None:
    x, weight = torch.ones(2, 40, dtype=weight_dtype), torch.ones(6, 40, dtype=weight_dtype)
    weight[1, 39], weight[2, 0] = torch.nan, torch.inf
    out = torch.empty(2, 6)
    linear(x, weight, None, out)
    assert out[:, 1].isnan().all()
    assert (out[:, 2] == torch.inf).all()
    assert (out[:, [0, 3, 4, 5]] == 40).all()
    narrow = torch.empty(2, 6, dtype=BF16)
    linear(x, weight, None, narrow)
    assert torch.equal(narrow.isnan(), out.isnan())


def test_many_rows_are_cut_into_blocks(isa: str) -> None:
    """More rows than a part has, in numbers that no block divides."""
    torch.manual_seed(4)
    weight = random(70, 24, dtype=BF16)
    for rows in (191, 192, 193, 577):
        for threads in (1, 2):
            check(random(rows, 24), weight, threads=threads)


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_a_row_does_not_depend_on_those_beside_it(isa: str, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, weight = random(40, 130, dtype=weight_dtype), random(100, 130, dtype=weight_dtype)
    together = check(x, weight)
    for i in range(40):
        assert torch.equal(check(x[i : i + 1], weight)[0], together[i])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (16, 2), (17, 3), (40, 12), (5, 7)])
def test_packed_order(outs: int, ins: int, dtype: torch.dtype) -> None:
    weight = random(outs, ins, dtype=dtype)
    found = packed(weight)
    panels, steps, _, width = found.shape
    rows = found.permute(0, 2, 1, 3).reshape(panels * PANEL, steps * width)
    assert torch.equal(rows[:outs, :ins], weight)
    assert not rows[outs:].any() and not rows[:, ins:].any()
    ids = torch.tensor([0, outs - 1, outs, -1, outs // 2, 1 << 40])
    looked_up = torch.full((len(ids), ins), torch.nan)
    kernel.rows(found, outs, ids, looked_up)
    expected = torch.stack([weight[i].float() if 0 <= i < outs else torch.zeros(ins) for i in ids.tolist()])
    assert torch.equal(looked_up, expected)


@pytest.mark.parametrize("x_dtype", [F32, BF16])
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
def test_heads_equal_single_products(
    isa: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Bit for bit; of views with NaN between the heads, which stay."""
    torch.manual_seed(6)
    for rows, heads, ins, outs in ((1, 1, 8, 16), (1, 5, 24, 20), (3, 2, 33, 17), (200, 3, 16, 40)):
        wide = torch.full((rows, heads, ins + 3), torch.nan, dtype=x_dtype)
        x = wide[..., 1 : ins + 1]
        x.copy_(random(rows, heads, ins))
        weight = random(heads, outs, ins, dtype=weight_dtype)
        expected = torch.stack([check(x[:, h], weight[h], out_dtype=out_dtype) for h in range(heads)], dim=1)
        for threads in (1, 2, 3):
            out = torch.full((rows, heads, outs + 2), torch.nan, dtype=out_dtype)
            kernel.heads(x, torch.stack([packed(one) for one in weight]), out[..., 2:], threads)
            assert torch.equal(out[..., 2:], expected)
            assert out[..., :2].isnan().all()


def test_heads_of_nothing(isa: str) -> None:
    for rows, heads, outs in ((0, 2, 3), (2, 0, 3), (2, 2, 0)):
        shape = heads, *packed_shape(outs, 4, 4)
        kernel.heads(torch.ones(rows, heads, 4), torch.zeros(shape), torch.empty(rows, heads, outs))


PACKED = packed_shape(3, 4, 4)


@pytest.mark.parametrize(
    ("x", "data", "out", "reason"),
    [
        (torch.ones(2, 4), torch.ones(2, *PACKED), torch.empty(2, 3), "rows, heads, count"),
        (torch.ones(2, 2, 4), torch.ones(3, *PACKED), torch.empty(2, 2, 3), "for each head"),
        (torch.ones(2, 2, 4), torch.ones(2, *PACKED), torch.empty(2, 2, 20), "for each head"),
        (torch.ones(2, 2, 4), torch.ones(2, *PACKED), torch.empty(1, 2, 3), "rows or heads"),
        (torch.ones(2, 3, 4), torch.ones(2, *PACKED), torch.empty(2, 2, 3), "rows or heads"),
        (torch.ones(2, 4, 2).mT, torch.ones(2, *PACKED), torch.empty(2, 2, 3), "dense"),
        (torch.ones(2, 2, 4), torch.ones(2, *PACKED), torch.empty(2, 3, 2).mT, "dense"),
        (torch.ones(2, 2, 4), torch.ones(2, *PACKED).transpose(2, 3), torch.empty(2, 2, 3), "contiguous"),
        (torch.ones(2, 2, 4), torch.ones(2, *PACKED).double(), torch.empty(2, 2, 3), "float32 and bfloat16"),
    ],
)
def test_heads_that_do_not_fit_are_refused(x: Tensor, data: Tensor, out: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kernel.heads(x, data, out)


@pytest.mark.parametrize(
    ("x", "data", "bias", "out", "reason"),
    [
        (torch.ones(2, 5), torch.ones(PACKED), None, torch.empty(2, 3), "another size"),
        (torch.ones(2, 4), torch.ones(PACKED), None, torch.empty(2, 20), "another size"),
        (torch.ones(2, 4), torch.ones(PACKED), torch.ones(2), torch.empty(2, 3), "bias"),
        (torch.ones(2, 4), torch.ones(PACKED).transpose(1, 2), None, torch.empty(2, 3), "contiguous"),
        (torch.ones(2, 4), torch.ones(PACKED), None, torch.empty(3, 2).T, "contiguous"),
        (torch.ones(2, 4), torch.ones(PACKED), None, torch.empty(4, 3), "as many rows"),
        (torch.ones(4, 2).T, torch.ones(PACKED), None, torch.empty(2, 3), "dense"),
        (torch.ones(2, 4).double(), torch.ones(PACKED), None, torch.empty(2, 3), "float32 and bfloat16"),
        (torch.ones(4), torch.ones(PACKED), None, torch.empty(2, 3), "two dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, data: Tensor, bias: Tensor | None, out: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kernel.linear(x, data, bias, out)


def test_packing_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="another size"):
        pack(torch.ones(20, 4), torch.empty(PACKED))
    with pytest.raises(ValueError, match="the type"):
        pack(torch.ones(3, 4), torch.empty(PACKED, dtype=BF16))
    with pytest.raises(ValueError, match="int64"):
        kernel.rows(torch.ones(PACKED), 3, torch.zeros(1), torch.empty(1, 4))


def test_instruction_set_from_the_environment() -> None:
    program = "from dcprt_kernel.linear import isa_in_use; print(isa_in_use())"

    def run(name: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DCPRT_KERNEL_ISA": name}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    for name in possible_isas():
        assert run(name).stdout.strip() == name
    assert run("").stdout.strip() == possible_isas()[-1]
    refused = run("avx9").stderr
    assert "DCPRT_KERNEL_ISA is 'avx9'" in refused
    assert ", ".join(possible_isas()) in refused


def test_forced_isa_ends() -> None:
    before = isa_in_use()
    with forced_isa("generic"):
        assert isa_in_use() == "generic"
    assert isa_in_use() == before
