"""Stands for KV: what a token's KV depends on is the whole prefix up to it, so that is what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dcprt.ids import PageId
from dcprt.kv.layout import Layout

EMPTY = 0


def extend(digest: int, token: int) -> int:
    """Digest of a prefix that goes on with `token`."""
    return hash((digest, token))


def start(namespace: str) -> int:
    """Digest of the empty prefix of a namespace."""
    return int.from_bytes(namespace.encode(), "little")


def digests(tokens: Iterable[int], seed: int = EMPTY) -> list[int]:
    """For every position, the digest of the prefix that ends there."""
    found = []
    for token in tokens:
        seed = extend(seed, token)
        found.append(seed)
    return found


class Pages:
    """What is stored where, rank-blind: page and offset in the span to digest."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._stored: dict[tuple[PageId, int], int] = {}

    def write(self, table: Sequence[PageId], first: int, values: Sequence[int]) -> None:
        """Store `values` at positions from `first` on."""
        for pos, value in enumerate(values, first):
            self._stored[table[self._layout.span(pos)], self._layout.in_span(pos)] = value

    def copy(self, src: PageId, dst: PageId, length: int) -> None:
        """The first `length` tokens of a span."""
        for offset in range(length):
            self._stored[dst, offset] = self._stored[src, offset]

    def read(self, table: Sequence[PageId], length: int, first: int = 0) -> list[int | None]:
        """What is stored at positions `first` to `length - 1`."""
        layout = self._layout
        return [self._stored.get((table[layout.span(p)], layout.in_span(p))) for p in range(first, length)]
