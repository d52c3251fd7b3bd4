"""The gated MLP of the Llama family."""

from __future__ import annotations

from torch import Tensor

from dcprt import ops
from dcprt.layers.linear import SummedLinear
from dcprt.ops import Matrix


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`; gate and up are one product, gate's rows first.

    The result is summed over the ranks if `down` is a `SummedLinear`, else it is this rank's part.
    """

    def __init__(self, gate_up: Matrix, down: SummedLinear | Matrix) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(ops.silu_mul(self._gate_up(x)))
