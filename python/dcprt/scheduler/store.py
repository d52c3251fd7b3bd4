"""Pages of requests: from where they come, when they are shared, when they go back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dcprt.ids import PageId
from dcprt.kv.allocator import PageAllocator
from dcprt.kv.layout import Layout
from dcprt.kv.radix import Node, RadixCache
from dcprt.messages import PageCopy
from dcprt.scheduler.request import Request


@dataclass(frozen=True)
class Admission:
    """What an admitted request starts with: `computed_len` tokens with KV, and perhaps a copy to make first."""

    computed_len: int
    copy: PageCopy | None


class KVStore:
    """Allocator and radix cache under one roof; counts pages, knows nothing of ranks."""

    def __init__(self, layout: Layout, num_pages: int, *, reuse: bool = True) -> None:
        self.layout = layout
        self.reuse = reuse
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(layout, self.allocator)

    @property
    def available_pages(self) -> int:
        """Pages that are free, or would be after eviction."""
        return self.allocator.free_pages + self.cache.evictable_pages

    @property
    def capacity_tokens(self) -> int:
        """Tokens of whole requests, over all ranks."""
        return self.allocator.capacity * self.layout.span_tokens

    def admit(self, request: Request, spare: int, transfer: str) -> Admission | None:
        """Attach the cached prefix to `request`, if pages for all its tokens are available beside `spare` others.

        The last token is never taken from the cache, since its logits are wanted. Where the copy of a partly
        matching page is what does not fit, it is left out. None changes nothing.
        """
        layout, cache = self.layout, self.cache
        reusable = request.tokens[:-1] if self.reuse and request.reads_cache else request.tokens[:0]
        match = cache.match(request.namespace, reusable)
        cache.lock(match.node)
        need = layout.pages_for(len(request.tokens)) - len(match.pages) + spare
        tail = match.tail if need + 1 <= self.available_pages else None
        if need > self.available_pages:
            cache.unlock(match.node)
            return None
        request.node, request.pages, request.owned = match.node, list(match.pages), set()
        if tail is None:
            return Admission(layout.floor_to_span(match.length), None)
        self.allocator.pin(transfer, tail)
        if not self.grow(request, match.length):
            return Admission(layout.floor_to_span(match.length), None)
        return Admission(match.length, PageCopy(tail, request.pages[-1], layout.in_span(match.length)))

    def grow(self, request: Request, length: int) -> list[PageId] | None:
        """Give `request` pages for `length` tokens, evicting if need be. None if there are not enough."""
        count = self.layout.pages_for(length) - len(request.pages)
        if count <= 0:
            return []
        while count > self.allocator.free_pages and self.cache.evict(count - self.allocator.free_pages):
            pass  # an evicted page that a plan still reads becomes free only later, so look again
        if count > self.allocator.free_pages:
            return None
        pages = self.allocator.alloc(count)
        request.pages += pages
        request.owned.update(pages)
        return pages

    def share(self, request: Request) -> None:
        """Let others match what is computed of a running request, up to its last whole span.

        Its last, growing page stays its own: a page that is still written cannot be the tree's.
        """
        length = self.layout.floor_to_span(request.computed_len)
        if self.reuse and request.node is not None and length > request.node.end:
            owned = len(request.owned)
            node = self._insert(request, length)
            if len(request.owned) == owned:
                return  # another request was first; lock no page that this one does not use
            self.cache.lock(node)
            self.cache.unlock(request.node)
            request.node = node

    def release(self, request: Request) -> None:
        """Take everything from `request`; what it computed stays in the cache as long as there is room."""
        if request.node is None:
            return
        length = min(request.computed_len, len(request.tokens))
        if self.reuse and length:
            self._insert(request, length)
        self.cache.unlock(request.node)
        self.allocator.free(sorted(request.owned))
        request.node, request.pages, request.owned = None, [], set()

    def discard(self, request: Request) -> None:
        """Take everything from `request`; nothing of it may be reused, since its numbers are wrong."""
        if request.node is None:
            return
        self.cache.unlock(request.node)
        self.allocator.free(sorted(request.owned))
        self.cache.forget(request.namespace, request.tokens)
        request.node, request.pages, request.owned = None, [], set()

    def _insert(self, request: Request, length: int) -> Node:
        """Offer the first `length` tokens to the tree; what it takes of the pages is no longer the request's."""
        pages = request.pages[: self.layout.pages_for(length)]
        node, kept = self.cache.insert(request.namespace, request.tokens[:length], pages)
        taken = set(pages[kept:])
        assert taken <= request.owned, (request.rid, taken - request.owned)
        request.owned -= taken
        return node

    def check(self, requests: Iterable[Request]) -> None:
        """Prove that no page is lost and none is in two places. Raises AssertionError."""
        self.cache.check()
        self.allocator.check(self.cache.pages(), {r.rid: r.owned for r in requests if r.owned})
