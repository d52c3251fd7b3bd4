"""RMS normalization."""

from __future__ import annotations

from torch import Tensor

from dcprt import ops
from dcprt.ops import Matrix


class RMSNorm:
    """`x / rms(x) * weight`, computed in float32, in the type of `weight`: [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape, in the type that matrix products take."""
        return ops.rms_norm(x, self.weight, self.eps)

    def of(self, x: Tensor, add: Tensor | None) -> Normed:
        """The norm of `x + add`, both float32 [tokens, hidden] and contiguous, once it is asked for."""
        return Normed(x, add, self.weight, self.eps)


class Normed:
    """The norm of a residual to which something is added first: computed once, alone or together with what follows.

    Whoever holds one takes it exactly once, by one of its methods. The residual has the sum then.
    """

    def __init__(self, x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> None:
        self._parts = x, add, weight, eps

    def value(self) -> Tensor:
        """[tokens, hidden] in the type of the weights."""
        return ops.add_rms_norm(*self._parts)

    def times(self, matrix: Matrix) -> Tensor:
        """Its product with `matrix`, in the type of the weights."""
        return matrix.normed(*self._parts)

    def gated(self, gate_up: Matrix, down: Matrix) -> Tensor:
        """Float32 [tokens, outs of down]: a gated MLP, see `Matrix.gated`."""
        return gate_up.gated(*self._parts, down)
