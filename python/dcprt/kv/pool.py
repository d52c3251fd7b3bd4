"""The KV of one rank: per layer, K and V as [pages, page_size, kv_heads, head_dim]."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt.ids import NULL_PAGE
from dcprt.kv.layout import LayoutDescriptor
from dcprt.messages import PageCopy


def zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the kernel hands out page by page on first touch: an unused pool costs nothing."""
    size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel()).view(shape)


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer, each [pages, page_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor

    def store(self, k: Tensor, v: Tensor, tokens: Tensor, slots: Tensor) -> None:
        """Write rows `tokens` of k, v: [tokens, kv_heads, head_dim] to `slots`."""
        if len(tokens):
            self.k.flatten(0, 1)[slots] = k[tokens].to(self.k.dtype)
            self.v.flatten(0, 1)[slots] = v[tokens].to(self.v.dtype)


class KVPool:
    """All layers' KV on one rank. Starts zeroed; page 0 takes padding writes."""

    def __init__(self, descriptor: LayoutDescriptor, num_pages: int) -> None:
        self.descriptor = descriptor
        self._layout = descriptor.layout
        shape = (num_pages, self._layout.page_size, len(descriptor.kv_heads), descriptor.head_dim)
        dtype = getattr(torch, descriptor.dtype)
        self.layers = [LayerKV(zeroed(shape, dtype), zeroed(shape, dtype)) for _ in range(descriptor.num_layers)]

    def copy(self, copies: list[PageCopy], dcp_rank: int) -> None:
        """Copy this rank's slots of each partly matching span to a fresh page."""
        for copy in copies:
            assert copy.dst != NULL_PAGE and copy.src != copy.dst
            count = self._layout.local_len(dcp_rank, copy.length)
            for layer in self.layers:
                layer.k[copy.dst, :count] = layer.k[copy.src, :count]
                layer.v[copy.dst, :count] = layer.v[copy.src, :count]
