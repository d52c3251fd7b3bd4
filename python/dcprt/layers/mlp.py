"""The gated MLP of the Llama family, `down(silu(gate(x)) * up(x))`; gate and up are one product, gate's rows first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt import ops
from dcprt.layers.linear import SummedLinear
from dcprt.layers.norm import Normed
from dcprt.ops import Matrix


@dataclass(frozen=True)
class Expert:
    """A gated MLP or this rank's part of it, over tokens that are normed already."""

    gate_up: Matrix
    down: Matrix

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to float32 of the same shape."""
        return self.down(ops.silu_mul(self.gate_up(x)), torch.float32)


@dataclass(frozen=True)
class GatedMLP:
    """A gated MLP cut over the ranks and summed."""

    gate_up: Matrix
    down: SummedLinear

    def __call__(self, x: Normed) -> Tensor:
        """To float32 [tokens, hidden]."""
        return self.down.summed(x.gated(self.gate_up, self.down.matrix))
