"""The KV of one rank: per layer, a tensor of pages."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt import ops
from dcprt.ids import NULL_PAGE
from dcprt.kv.layout import LayoutDescriptor
from dcprt.messages import PageCopy


def zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system hands out in huge pages on first touch: what is not used costs nothing, and reading
    seldom waits for an address.
    """
    size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel()).view(shape)


@dataclass(frozen=True)
class LayerKV:
    """The KV of one layer.

    k: [pages, page_size, kv_heads, key_dim], contiguous. v: [pages, page_size, kv_heads, value_dim]; where a token's
    values are part of its key (MLA latents), a view of the first elements of k, else contiguous (`own_values`).
    """

    k: Tensor
    v: Tensor
    own_values: bool = True

    @classmethod
    def zeroed(cls, descriptor: LayoutDescriptor, num_pages: int) -> LayerKV:
        shape = (num_pages, descriptor.layout.page_size, len(descriptor.kv_heads))
        dtype = getattr(torch, descriptor.dtype)
        k = zeroed((*shape, descriptor.key_dim), dtype)
        if descriptor.own_values:
            return cls(k, zeroed((*shape, descriptor.value_dim), dtype))
        return cls(k, k[..., : descriptor.value_dim], own_values=False)

    @property
    def tensors(self) -> list[Tensor]:
        """What really holds memory."""
        return [self.k, self.v] if self.own_values else [self.k]

    def context(self, pages: Tensor, start: int, stop: int) -> Tensor:
        """Slots `start` to `stop` of the tokens in `pages`, in order, keys and own values side by side."""
        size = self.k.shape[1]
        first, last = start // size, -(-stop // size)
        cut = slice(start - first * size, max(stop - first * size, 0))
        return torch.cat([x[pages[first:last]].flatten(0, 1)[cut] for x in self.tensors], dim=-1)

    def split(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What `context` returned, to keys and values."""
        key_dim, value_dim = self.k.shape[-1], self.v.shape[-1]
        values = slots[..., key_dim:] if self.own_values else slots[..., :value_dim]
        return slots[..., :key_dim], values

    def store(self, k: Tensor, v: Tensor | None, tokens: Tensor, slots: Tensor) -> None:
        """Write rows `tokens` of k, v: [tokens, kv_heads, dim] to `slots`; no `v` where values are part of k."""
        ops.store(self.k, k, tokens, slots)
        if v is not None:
            ops.store(self.v, v, tokens, slots)


class KVPool:
    """All layers' KV on one rank. Starts zeroed; page 0 takes padding writes."""

    def __init__(self, descriptor: LayoutDescriptor, num_pages: int) -> None:
        self.descriptor = descriptor
        self._layout = descriptor.layout
        self.layers = [LayerKV.zeroed(descriptor, num_pages) for _ in range(descriptor.num_layers)]
        self.pairs = [(layer.k, layer.v) for layer in self.layers]
        """Keys and values of each layer, the same list for good."""
        self._copy = ops.PageCopies([pool for layer in self.layers for pool in layer.tensors])

    def copy(self, copies: list[PageCopy], dcp_rank: int) -> None:
        """Copy this rank's slots of each partly matching span to a fresh page."""
        for copy in copies:
            assert copy.dst != NULL_PAGE and copy.src != copy.dst
            count = self._layout.local_len(dcp_rank, copy.length)
            self._copy(copy.src, copy.dst, count)
