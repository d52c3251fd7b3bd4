"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """`x / rms(x) * weight`, computed in float32, in the type of `weight`: [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [tokens, hidden] to the same shape, in the type that matrix products take."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
        return (x * scale * self.weight).to(self.weight.dtype)
