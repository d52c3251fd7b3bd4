"""Pages: who has which. Rank-blind, since the same page id is taken on every rank at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dcprt.ids import PageId


class PageAllocator:
    """Gives out pages 1 .. num_pages-1; page 0 is where padding writes land.

    A page that is a copy source of a plan in flight is *pinned* by that transfer. Freeing it then only marks it; it
    is free once the transfer is over, so no plan can write where an earlier one still reads.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._free = [PageId(page) for page in range(num_pages - 1, 0, -1)]
        self._pins: Counter[PageId] = Counter()
        self._transfers: dict[str, list[PageId]] = {}
        self._freed_while_pinned: set[PageId] = set()

    @property
    def capacity(self) -> int:
        """Pages that can be given out at all."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[PageId]:
        """`count` pages; the caller made sure that there are as many."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def free(self, pages: Iterable[PageId]) -> None:
        """Give pages back."""
        for page in pages:
            assert 0 < page < self.num_pages, page
            if self._pins[page]:
                assert page not in self._freed_while_pinned, f"page {page} freed twice"
                self._freed_while_pinned.add(page)
            else:
                self._free.append(page)

    def pin(self, transfer: str, page: PageId) -> None:
        """`transfer` reads `page` until `end_transfer(transfer)`."""
        self._pins[page] += 1
        self._transfers.setdefault(transfer, []).append(page)

    def end_transfer(self, transfer: str) -> None:
        """All reads of `transfer` are done. Unknown names are fine: most plans copy nothing."""
        for page in self._transfers.pop(transfer, ()):
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]
                if page in self._freed_while_pinned:
                    self._freed_while_pinned.remove(page)
                    self._free.append(page)

    def check(self, cached: Iterable[PageId], owned: Mapping[str, Iterable[PageId]]) -> None:
        """Prove that every page but page 0 is in exactly one place.

        `cached` are the radix tree's pages, `owned` those of each request. Raises AssertionError with the pages
        that are lost, listed twice, or out of range.
        """
        places: dict[PageId, list[str]] = {}
        ours = [("free", self._free), ("cached", cached), ("transfer", self._freed_while_pinned)]
        for holder, pages in [*ours, *((f"request {rid}", pages) for rid, pages in owned.items())]:
            for page in pages:
                places.setdefault(page, []).append(holder)
        twice = {page: holders for page, holders in places.items() if len(holders) > 1}
        lost = set(range(1, self.num_pages)) - places.keys()
        alien = [page for page in places if not 0 < page < self.num_pages]
        assert not (twice or lost or alien), f"twice: {twice}, lost: {sorted(lost)}, out of range: {alien}"
