"""Where a token lives. The only module that multiplies or divides by `dcp`.

A span is the `page_size * dcp` consecutive positions that one page id covers over all ranks. Inside it, runs of
`interleave` positions go round the ranks. The owner of a token depends on its position alone, so a shared prefix
has the same owners in every request.

Functions of positions take ints or integer numpy arrays and return the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dcprt.ids import Span

IntArray = npt.NDArray[np.int64]
Ints = TypeVar("Ints", int, IntArray)


@dataclass(frozen=True)
class Layout:
    """`page_size` slots a page and rank, `dcp` ranks, `interleave` consecutive positions on one rank."""

    page_size: int = 16
    dcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        assert self.page_size % self.interleave == 0, (self.page_size, self.interleave)

    @property
    def span_tokens(self) -> int:
        """Positions that one page id covers over all ranks."""
        return self.page_size * self.dcp

    def span(self, pos: Ints) -> Ints:
        """Which entry of the request's page table."""
        return pos // self.span_tokens

    def owner(self, pos: Ints) -> Ints:
        """The dcp rank that stores the position."""
        return pos % self.span_tokens // self.interleave % self.dcp

    def page_slot(self, pos: Ints) -> Ints:
        """The slot inside the page, on the owner."""
        offset = pos % self.span_tokens
        return offset // (self.interleave * self.dcp) * self.interleave + offset % self.interleave

    def slots(self, pos: IntArray, page_table: IntArray) -> IntArray:
        """Slots of `pos` on their owners, given the request's `page_table`."""
        return page_table[self.span(pos)] * self.page_size + self.page_slot(pos)

    def local_len(self, rank: int, length: int) -> int:
        """How many of the first `length` positions `rank` stores."""
        cycle = self.dcp * self.interleave
        rest = length % cycle - rank * self.interleave
        return length // cycle * self.interleave + min(max(rest, 0), self.interleave)

    def local_positions(self, rank: int, length: int) -> IntArray:
        """Positions that `rank` stores of the first `length`, in the order of its slots."""
        local = np.arange(self.local_len(rank, length), dtype=np.int64)
        run, place = np.divmod(local, self.interleave)
        return (run * self.dcp + rank) * self.interleave + place

    def local_pages(self, local_len: int) -> int:
        """Pages that hold `local_len` tokens of one rank."""
        return -(-local_len // self.page_size)

    def pages_for(self, length: int) -> int:
        """Pages that hold `length` tokens."""
        return -(-length // self.span_tokens)

    def whole_spans(self, length: int) -> Span:
        """Spans that `length` tokens fill completely."""
        return Span(length // self.span_tokens)

    def floor_to_span(self, length: int) -> int:
        """`length` rounded down to whole spans."""
        return length // self.span_tokens * self.span_tokens

    def in_span(self, length: int) -> int:
        """Tokens of `length` behind its last whole span."""
        return length % self.span_tokens


@dataclass(frozen=True)
class LayoutDescriptor:
    """What a shard of KV is made of; goes with every shard that leaves the process.

    A token takes `key_dim` and, if `own_values`, `value_dim` elements a KV head and layer; else its values are the
    first `value_dim` elements of its key.
    """

    layout: Layout
    num_layers: int
    kv_heads: tuple[int, ...]
    key_dim: int
    value_dim: int
    own_values: bool
    dtype: str
    cache_groups: tuple[str, ...] = ("full",)
