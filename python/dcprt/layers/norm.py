"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """`x / rms(x) * weight`, the root mean square in float32. weight: [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * scale).to(x.dtype) * self.weight
