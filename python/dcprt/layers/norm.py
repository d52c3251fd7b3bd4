"""RMS normalization."""

from __future__ import annotations

from torch import Tensor

from dcprt import ops


class RMSNorm:
    """`x / rms(x) * weight`, computed in float32, in the type of `weight`: [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape, in the type that matrix products take."""
        return ops.rms_norm(x, self.weight, self._eps)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """The norm of `x + y`, both float32 [tokens, hidden]; x becomes the sum."""
        return ops.add_rms_norm(x, y, self.weight, self._eps)
