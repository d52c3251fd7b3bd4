"""Coded matrices give what packed ones give, to the last bit."""

from __future__ import annotations

import pytest

pytest.importorskip("dcprt_kernel.linear")

import torch
from torch import Tensor

from dcprt_kernel.fused import norm_gated_mlp, norm_linear
from dcprt_kernel.linear import code, coded_room, linear, rows

from .tensors import coded, packed, unaligned

F32, BF16 = torch.float32, torch.bfloat16
UPPER = torch.tensor([15, 16, 48, 60, 61, 62, 63, 64, 65, 143, 144, 176, 188, 189, 190, 191])
"""Upper bytes of a matrix that needs no unit kept; zeros are none of them."""


def same(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = F32, threads: int = 1) -> None:
    """Products with the matrix, packed and coded, have the same bits."""
    found = []
    for matrix in (packed(weight), coded(weight)):
        out = torch.full((len(x), len(weight)), torch.nan, dtype=out_dtype)
        linear(x, matrix, bias, out, threads)
        found.append(out)
    assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8))


def random(outs: int, ins: int, scale: float = 0.05) -> Tensor:
    """Like the weights of a model: few of them so small that they have an exponent of their own."""
    return (torch.randn(outs, ins) * scale).to(BF16)


def sixteen(outs: int, ins: int) -> Tensor:
    """Every lower byte, and 16 different upper ones."""
    bits = UPPER[torch.randint(16, (outs, ins))] << 8 | torch.randint(256, (outs, ins))
    return bits.to(torch.int16).view(BF16)


@pytest.mark.parametrize("ins", [57, 63, 64, 65, 130, 577])
def test_odd_sizes(isa: str, ins: int) -> None:
    torch.manual_seed(ins)
    for outs in (150, 160, 333):
        for count in (1, 2, 5, 8, 9, 17):
            same(torch.randn(count, ins), random(outs, ins))


@pytest.mark.parametrize("count", [*range(1, 18), 33, 191, 193])
def test_every_number_of_rows(isa: str, count: int) -> None:
    torch.manual_seed(count)
    same(torch.randn(count, 96).to(BF16), sixteen(170, 96), threads=1 + count % 3)


@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("bias_dtype", [None, F32, BF16])
def test_types(isa: str, bias_dtype: torch.dtype | None, out_dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    bias = None if bias_dtype is None else torch.randn(170, dtype=bias_dtype)
    for x in (torch.randn(6, 75), unaligned(torch.randn(6, 75).to(BF16))):
        same(x, random(170, 75), bias, out_dtype)


def test_threads(isa: str) -> None:
    torch.manual_seed(2)
    for threads in (2, 3):
        for count in (1, 3, 40):
            same(torch.randn(count, 300), random(1501, 300), threads=threads)


@pytest.mark.parametrize("odd", [0.0, -0.0, torch.inf, torch.nan, 2.0**-126, 2.0**-133, 3e38, -1e-30])
def test_units_that_are_kept(isa: str, odd: float) -> None:
    """Weights with an upper byte that no code stands for, at the first, the last and neighbouring places."""
    torch.manual_seed(3)
    for places in ([(0, 0)], [(169, 95)], [(0, 7), (0, 8), (15, 9), (17, 95), (169, 0)]):
        weight = sixteen(170, 96)
        for place in places:
            weight[place] = odd
        for count in (1, 8, 9):
            same(torch.randn(count, 96), weight)


def test_many_kept_units(isa: str) -> None:
    torch.manual_seed(4)
    weight = sixteen(160, 256)
    weight[0::16, 0::24] = 1e30  # a third of all units
    for count in (1, 3, 20):
        same(torch.randn(count, 256), weight)


def test_rows_of_the_matrix() -> None:
    torch.manual_seed(5)
    for outs, ins in ((170, 96), (150, 131)):
        weight = random(outs, ins)
        weight[3, 9] = torch.inf
        ids = torch.tensor([0, outs - 1, outs, -1, 3, 1 << 40])
        out = torch.full((len(ids), ins), torch.nan)
        rows(coded(weight), outs, ids, out)
        expected = torch.stack([weight[i].float() if 0 <= i < outs else torch.zeros(ins) for i in ids.tolist()])
        assert torch.equal(out, expected)


def test_every_upper_byte_comes_back() -> None:
    """All 65,536 weights, in rows of 16 upper bytes each, so that the table is another one for each matrix."""
    bits = torch.arange(1 << 16).view(16, 4096)
    for part in bits:
        weight = part.to(torch.int16).view(BF16).view(32, 128).repeat(4, 1)
        room = torch.empty(coded_room(*weight.shape), dtype=torch.uint8)
        used = code(weight, room)
        out = torch.empty(len(weight), 128)
        rows(room[:used], len(weight), torch.arange(len(weight)), out)
        assert torch.equal(out.view(torch.int32), weight.float().view(torch.int32))


def test_views() -> None:
    """Rows further apart than they are long."""
    torch.manual_seed(6)
    wide = random(170, 120)
    assert torch.equal(coded(wide[:, 3:99]), coded(wide[:, 3:99].contiguous()))


def test_threads_change_nothing() -> None:
    """Parts of every size, of which the last one may have fewer outputs than a panel; units are kept in all of them."""
    torch.manual_seed(9)
    for outs in (160, 171, 530):
        weight = random(outs, 104)
        weight.view(-1)[:: 13 * 104 + 5] = -1e30
        rooms = [torch.full((coded_room(*weight.shape),), 255, dtype=torch.uint8) for _ in range(5)]
        used = [code(weight, room, threads) for room, threads in zip(rooms, (1, 2, 3, 8, 100), strict=True)]
        assert used[0] > 0 and len(set(used)) == 1
        assert all(torch.equal(room[: used[0]], rooms[0][: used[0]]) for room in rooms)


def test_size() -> None:
    torch.manual_seed(7)
    weight = random(576, 1536)
    assert len(coded(weight)) <= 0.77 * weight.nbytes


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(0, 8, dtype=BF16),
        torch.zeros(3, 0, dtype=BF16),
        torch.ones(1, 1, dtype=BF16),
        torch.arange(-32768, 32767, 2).to(torch.int16).view(BF16).view(-1, 64)[:496].T,
    ],
    ids=["no outputs", "no inputs", "one weight", "too many exponents"],
)
def test_what_does_not_pay_is_not_coded(weight: Tensor) -> None:
    weight = weight.contiguous()
    assert code(weight, torch.empty(coded_room(*weight.shape), dtype=torch.uint8)) == 0


def test_fused_products_take_coded_matrices(isa: str) -> None:
    torch.manual_seed(8)
    norm, bias, gate_up, down = torch.ones(96, dtype=BF16), torch.randn(320).to(BF16), random(320, 96), random(96, 160)
    for count in (1, 5, 200):
        x, results = torch.randn(count, 96), []
        for form in (packed, coded):
            first, out = torch.empty(count, 320, dtype=BF16), torch.empty(count, 96)
            norm_linear(x.clone(), None, norm, 1e-5, form(gate_up), bias, first, 2)
            norm_gated_mlp(x.clone(), None, norm, 1e-5, form(gate_up), bias, form(down), 160, out, 2)
            results.append((first, out))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_what_does_not_fit_is_refused() -> None:
    weight = sixteen(160, 96)
    good, x, out = coded(weight), torch.ones(1, 96), torch.empty(1, 160)
    for data in (good[:-64], good[:32], torch.cat([good, good[:8]])):
        with pytest.raises(ValueError, match="another size"):
            linear(x, data, None, out)
    with pytest.raises(ValueError, match="another size"):
        linear(x[:, :95], good, None, out)
    with pytest.raises(ValueError, match="aligned"):
        linear(x, torch.cat([good[:1], good])[1:], None, out)
    with pytest.raises(ValueError, match="only bfloat16"):
        code(weight.float(), torch.empty(1 << 20, dtype=torch.uint8))
    with pytest.raises(ValueError, match="more room"):
        code(weight, torch.empty(coded_room(160, 96) - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        code(weight, torch.empty(1 << 20))
