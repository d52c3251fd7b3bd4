"""Matrix products, whole or cut over ranks.

Products take the model's type; what is summed over ranks, the residual and the logits are float32, so that a bfloat16
model loses nothing there. A logit of 25 rounded to bfloat16 is off by up to 0.06, which is often more than what lies
between the two best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt.comm.protocol import Collective
from dcprt.ops import Matrix
from dcprt.parallel.grid import WidthShard


class SummedLinear:
    """A product cut by columns: each rank has part of the input, and the outputs are summed over the ranks."""

    def __init__(self, matrix: Matrix, world: Collective, bias: Tensor | None = None) -> None:
        self.matrix = matrix
        self.bias = bias
        self._world = world

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] to float32 [tokens, out]."""
        return self.summed(self.matrix(x, torch.float32))

    def summed(self, part: Tensor) -> Tensor:
        """This rank's float32 product [tokens, out], summed over the ranks, and the bias."""
        out = self._world.all_reduce(part)
        return out if self.bias is None else out + self.bias


class VocabEmbedding:
    """Rows of the vocabulary cut over ranks. matrix: [shard.padded, hidden]."""

    def __init__(self, matrix: Matrix, shard: WidthShard, world: Collective) -> None:
        self._matrix = matrix
        self._shard = shard
        self._world = world

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] to float32 [tokens, hidden]."""
        if self._world.size == 1:
            return self._matrix.rows(token_ids)
        here = (token_ids >= self._shard.start) & (token_ids < self._shard.stop)
        return self._world.all_reduce(self._matrix.rows(torch.where(here, token_ids - self._shard.start, -1)))


class VocabLogits:
    """Products with a vocabulary cut over ranks, in float32; padded rows never leave this class."""

    def __init__(self, matrix: Matrix, vocab_size: int, world: Collective) -> None:
        self._matrix = matrix
        self._vocab_size = vocab_size
        self._world = world

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to float32 [rows, vocab_size], on every rank."""
        local = self._matrix(hidden, torch.float32)
        if self._world.size > 1:
            local = self._world.all_gather(local).transpose(0, 1).flatten(1)
        return local[:, : self._vocab_size]
