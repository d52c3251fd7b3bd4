"""Products and lookups cut over ranks equal those of the whole matrix."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcprt.comm.groups import local_groups
from dcprt.comm.protocol import Collective
from dcprt.ids import Rank
from dcprt.layers.linear import SummedLinear, VocabEmbedding, VocabLogits
from dcprt.layers.norm import RMSNorm
from dcprt.ops import BLOCK, Matrix, bucket
from dcprt.parallel.grid import Grid, WidthShard


def on_ranks(tp: int, work: Callable[[int, Collective], Tensor]) -> list[Tensor]:
    """`work` on every rank, each a thread; their results."""
    groups = local_groups(tp, 1)
    results: list[Tensor] = [torch.empty(0)] * tp

    def run(rank: int) -> None:
        results[rank] = work(rank, groups[rank].world)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def padded(weight: Tensor, part: WidthShard) -> Tensor:
    out = torch.zeros(part.padded, *weight.shape[1:], dtype=weight.dtype)
    out[: part.stop - part.start] = weight[part.start : part.stop]
    return out


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("vocab", [7, 40, BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary(tp: int, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    weight = torch.randn(vocab, 12).to(dtype)
    ids = torch.tensor([0, vocab - 1, 3, 3, vocab // 2])
    hidden = torch.randn(4, 12).to(dtype)

    def embed(rank: int, world: Collective) -> Tensor:
        part = Grid(tp, 1).width(Rank(rank), vocab)
        return VocabEmbedding(Matrix(padded(weight, part)), part, world)(ids)

    def logits(rank: int, world: Collective) -> Tensor:
        part = Grid(tp, 1).width(Rank(rank), vocab)
        return VocabLogits(Matrix(padded(weight, part)), vocab, world)(hidden)

    for found in on_ranks(tp, embed):
        assert torch.equal(found, weight[ids].float())
    for found in on_ranks(tp, logits):
        torch.testing.assert_close(found, F.linear(hidden.float(), weight.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_summed_linear_adds_its_bias_once(tp: int) -> None:
    torch.manual_seed(tp)
    weight, bias, x = torch.randn(5, 10), torch.randn(5), torch.randn(3, 10)

    def product(rank: int, world: Collective) -> Tensor:
        part = Grid(tp, 1).width(Rank(rank), 10)
        columns = padded(weight.T.contiguous(), part).T.contiguous()
        inputs = padded(x.T.contiguous(), part).T.contiguous()
        return SummedLinear(Matrix(columns), world, bias)(inputs)

    results = on_ranks(tp, product)
    for found in results:
        torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
        assert torch.equal(found, results[0])


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 20) * 30, torch.randn(20)
    expected = F.rms_norm(x.double(), (20,), weight.double(), 1e-5)
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), expected.float(), atol=1e-5, rtol=1e-5)
    assert RMSNorm(weight.bfloat16(), 1e-5)(x).dtype == torch.bfloat16


def test_buckets_are_few_and_close() -> None:
    sizes = {rows: bucket(rows) for rows in range(1, 4097)}
    assert all(rows <= size <= 1.25 * rows for rows, size in sizes.items() if rows > 16)
    assert all(sizes[rows] == rows for rows in range(1, 17))
    assert len(set(sizes.values())) == 16 + 4 * 8
    assert bucket(0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 130])
def test_padded_rows_change_nothing(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 24).to(dtype), torch.randn(10, 24).to(dtype), torch.randn(10).to(dtype)
    found = Matrix(weight, bias)(x)
    assert found.shape == (rows, 10)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), exact, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
