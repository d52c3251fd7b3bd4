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


class Linear:
    """`x @ weight.T + bias`. weight: [out, in]; cut by rows, its output is this rank's part and needs no sum."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class SummedLinear:
    """A product cut by columns: each rank has part of the input, and the outputs are summed over the ranks."""

    def __init__(self, weight: Tensor, world: Collective, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._world = world

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] to float32 [tokens, out]."""
        out = self._world.all_reduce(ops.linear(x, self.weight, out_dtype=torch.float32))
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
