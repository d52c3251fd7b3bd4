"""Matrix products, whole or cut over ranks.

Products take the model's type; what is summed over ranks, the residual and the logits are float32, so that a bfloat16
model loses nothing there. A logit of 25 rounded to bfloat16 is off by up to 0.06, which is often more than what lies
between the two best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt import ops
from dcprt.comm.protocol import Collective
from dcprt.parallel.grid import WidthShard


def bucket(rows: int) -> int:
    """The number of rows that `rows` are padded to: at most a quarter more, four different ones between powers of 2."""
    if rows <= 16:
        return rows
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    In bfloat16 it is oneDNN's, which makes and keeps a program of some 600 KiB for every number of rows it meets; steps
    have thousands of different ones, so rows are padded to a few.
    """
    rows = x.shape[0]
    if x.dtype != torch.bfloat16 or bucket(rows) == rows:
        return F.linear(x, weight, bias)
    padded = x.new_zeros(bucket(rows), x.shape[1])
    padded[:rows] = x
    return F.linear(padded, weight, bias)[:rows]


class Linear:
    """`x @ weight.T + bias`. weight: [out, in]; cut by rows, its output is this rank's part and needs no sum."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class SummedLinear:
    """A product cut by columns: each rank has part of the input, and the outputs are summed over the ranks."""

    def __init__(self, weight: Tensor, world: Collective, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._world = world

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] to float32 [tokens, out]."""
        out = self._world.all_reduce(product(x, self.weight).float())
        return out if self.bias is None else out + self.bias


class VocabEmbedding:
    """Rows of the vocabulary cut over ranks. weight: [shard.padded, hidden]."""

    def __init__(self, weight: Tensor, shard: WidthShard, world: Collective) -> None:
        self.weight = weight
        self._shard = shard
        self._world = world

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] to float32 [tokens, hidden]."""
        if self._world.size == 1:
            return self.weight[token_ids].float()
        local = token_ids - self._shard.start
        here = (local >= 0) & (token_ids < self._shard.stop)
        found = self.weight[torch.where(here, local, 0)].float() * here.unsqueeze(-1)
        return self._world.all_reduce(found)


class VocabLogits:
    """Products with a vocabulary cut over ranks, in float32; padded rows never leave this class."""

    def __init__(self, weight: Tensor, vocab_size: int, world: Collective) -> None:
        self.weight = weight
        self._vocab_size = vocab_size
        self._world = world

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to float32 [rows, vocab_size], on every rank."""
        local = ops.wide_linear(hidden, self.weight)
        if self._world.size > 1:
            local = self._world.all_gather(local).transpose(0, 1).flatten(1)
        return local[:, : self._vocab_size]
