"""Tensors as kernels get them."""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt_kernel.linear import code, coded_room, pack, packed_shape


def unaligned(x: Tensor) -> Tensor:
    """A copy that begins one element behind a multiple of 64 bytes."""
    memory = x.new_empty(x.numel() + 1)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def packed(weight: Tensor) -> Tensor:
    """A matrix as products read it, with NaN wherever nothing was written."""
    out = torch.full(packed_shape(*weight.shape, weight.dtype.itemsize), torch.nan, dtype=weight.dtype)
    pack(weight, out)
    return out


def coded(weight: Tensor) -> Tensor:
    """A bfloat16 matrix, coded."""
    room = torch.full((coded_room(*weight.shape),), 255, dtype=torch.uint8)
    used = code(weight, room)
    assert used
    return room[:used].clone()
