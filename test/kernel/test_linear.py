"""Native products with few rows, against float64 products of the same inputs, for every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("dcprt_kernel.linear")

import torch
from torch import Tensor

from dcprt_kernel.linear import forced_isa, isa_in_use, linear, possible_isas

F32, BF16 = torch.float32, torch.bfloat16
EPS = 2.0**-23


@pytest.fixture(params=possible_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


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
    for outs in (1, 2, 3, 4, 5, 7, 64, 130):
        for rows in (1, 2, 3, 4, 5, 17):
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
        one = check(x, weight)
        for threads in (2, 3):
            for _ in range(20):
                assert torch.equal(check(x, weight, threads=threads), one)


def test_several_callers_at_once() -> None:
    torch.manual_seed(3)
    jobs = [(random(2, 256), random(1200, 256)) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: check(*job, threads=2), jobs))
    for out, job in zip(found, jobs, strict=True):
        assert torch.equal(out, check(*job))


def test_forked_child_has_threads_of_its_own() -> None:
    program = """
import os, torch
from dcprt_kernel.linear import linear
x, weight, out = torch.ones(1, 512), torch.ones(2048, 512), torch.empty(1, 2048)
linear(x, weight, None, out, 2)
child = os.fork()
out.zero_()
linear(x, weight, None, out, 2)
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


@pytest.mark.parametrize(
    ("x", "weight", "bias", "out", "reason"),
    [
        (torch.ones(2, 5), torch.ones(3, 4), None, torch.empty(2, 3), "inner size"),
        (torch.ones(2, 4), torch.ones(3, 4), None, torch.empty(2, 4), "rows of weight"),
        (torch.ones(2, 4), torch.ones(3, 4), torch.ones(2), torch.empty(2, 3), "bias"),
        (torch.ones(2, 4), torch.ones(4, 3).T, None, torch.empty(2, 3), "dense"),
        (torch.ones(2, 4), torch.ones(3, 4), None, torch.empty(3, 2).T, "contiguous"),
        (torch.ones(2, 4).double(), torch.ones(3, 4), None, torch.empty(2, 3), "float32 and bfloat16"),
        (torch.ones(4), torch.ones(3, 4), None, torch.empty(2, 3), "two dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        linear(x, weight, bias, out)


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
