"""Prefix reuse at token granularity: a radix tree whose edges split at any position.

Which node owns a page that is only partly its own:

* A page that straddles the start of a node belongs to that node, not to its parent: it holds the parent's last
  tokens too, because whoever computed the node had copied them there.
* A node that ends inside a page owns that tail page only while it has no children. With children, each child's first
  page holds the same tokens. When the last child goes, its first page moves up.

So a node that covers positions [start, end) owns the pages of spans start//S .. end//S - 1, and span end//S too if it
is a leaf that ends inside it (S = span_tokens). Locked nodes always end at a whole span.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dcprt.ids import PageId
from dcprt.kv.allocator import PageAllocator
from dcprt.kv.layout import Layout

Tokens: TypeAlias = "array[int]"
"""Token ids as an array of typecode "i": compact, and compared as memory."""


def common_len(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix; halves until it finds the difference, comparing whole slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low if a[low] != b[low] else low + 1


@dataclass(eq=False)
class Node:
    """An edge of the tree and the pages it owns; see the module's text for which these are."""

    key: Tokens
    start: int
    pages: list[PageId]
    parent: Node | None
    seq: int
    last_use: int = 0
    locks: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.key)

    @property
    def is_root(self) -> bool:
        return self.parent is None


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of a request.

    `pages` are the whole spans, to be shared by reference while `node` is locked. `length` may go beyond them; the
    tokens between are in page `tail`, to be copied.
    """

    length: int
    node: Node
    pages: list[PageId]
    tail: PageId | None


class RadixCache:
    """Token sequences by namespace, and the pages that hold their KV."""

    def __init__(self, layout: Layout, allocator: PageAllocator) -> None:
        self._layout = layout
        self._allocator = allocator
        self._roots: dict[str, Node] = {}
        self._names: dict[Node, str] = {}
        self._clock = 0
        self._seq = 0
        self._num_nodes = 0
        self._candidates: list[tuple[int, int, Node]] = []
        self._evictable = 0

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""
        return self._evictable

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """The longest cached prefix of `tokens`; splits an edge at the last whole span, so that it can be locked."""
        node, length = self._walk(namespace, tokens)
        whole = self._layout.floor_to_span(length)
        tail = self._tail_page(node, length) if length > whole else None
        while not node.is_root and node.start >= whole:
            node = self._parent(node)
        if node.end > whole:
            node = self._split(node, whole)
        return Match(length, node, self._path_pages(node), tail)

    def lock(self, node: Node) -> None:
        """Keep the path to `node`, which ends at a whole span, from being evicted."""
        assert self._layout.in_span(node.end) == 0
        step: Node | None = node
        while step is not None:
            if not step.locks:
                self._evictable -= len(step.pages)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`."""
        step: Node | None = node
        while step is not None:
            assert step.locks > 0
            step.locks -= 1
            if not step.locks:
                self._evictable += len(step.pages)
                self._offer(step)
                self._drop_if_empty(step)
            step = step.parent

    def insert(self, namespace: str, tokens: Tokens, pages: Sequence[PageId]) -> tuple[Node, int]:
        """Add `tokens`, whose KV is in `pages` (one per span).

        Returns the last node, and the number of leading `pages` that the tree did not take, because it has their
        tokens already: they stay with the caller, the others are the tree's from now on.
        """
        assert len(pages) == self._layout.pages_for(len(tokens)), (len(pages), len(tokens))
        node, length = self._walk(namespace, tokens)
        if node.end > length:
            node = self._split(node, length)
        if length == len(tokens):
            return node, len(pages)
        first = self._layout.span(length)
        if not node.children and self._layout.in_span(node.end) and not node.is_root:
            self._give_back(node, [node.pages.pop()])
        child = Node(tokens[length:], length, list(pages[first:]), node, self._next_seq(), self._clock)
        node.children[tokens[length]] = child
        self._num_nodes += 1
        self._evictable += len(child.pages)
        self._offer(child)
        return child, first

    def evict(self, count: int) -> int:
        """Free up to `count` pages of unlocked nodes, leaves first, longest unused first; returns how many.

        A long leaf is cut from its end, so that what is kept of it stays the longest useful prefix.
        """
        freed = 0
        while freed < count and self._candidates:
            last_use, _, node = heapq.heappop(self._candidates)
            if node.last_use != last_use or not self._is_free_leaf(node):
                continue
            freed += self._cut(node, count - freed)
        return freed

    def flush(self) -> int:
        """Evict everything that is not locked; returns the number of pages."""
        return self.evict(self._evictable)

    def forget(self, namespace: str, tokens: Tokens) -> None:
        """Free what is cached of `tokens`, from its end up to where others hold it or branch off."""
        node, _ = self._walk(namespace, tokens)
        while not node.is_root and self._is_free_leaf(node):
            parent = self._parent(node)
            self._cut(node, len(node.pages))
            node = parent

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.is_root:
                yield node

    def pages(self) -> Iterator[PageId]:
        """All pages the tree owns."""
        for node in self.nodes():
            yield from node.pages

    def check(self) -> None:
        """Prove the invariants of the module's text. Raises AssertionError."""
        evictable = count = 0
        for node in self.nodes():
            count += 1
            parent = self._parent(node)
            assert node.start == parent.end and len(node.key) > 0
            assert parent.children[node.key[0]] is node
            assert parent.locks >= node.locks
            owned = self._layout.span(node.end) - self._layout.span(node.start)
            if not node.children and self._layout.in_span(node.end):
                owned += 1
            assert len(node.pages) == owned, (node.start, node.end, node.pages)
            evictable += 0 if node.locks else len(node.pages)
        assert evictable == self._evictable, (evictable, self._evictable)
        assert count == self._num_nodes, (count, self._num_nodes)

    def _walk(self, namespace: str, tokens: Tokens) -> tuple[Node, int]:
        """The deepest node that shares a token with `tokens`, and the length of the common prefix."""
        self._clock += 1
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(array("i"), 0, [], None, self._next_seq())
            self._names[node] = namespace
        length = 0
        while length < len(tokens) and (child := node.children.get(tokens[length])) is not None:
            shared = common_len(child.key, tokens[length : length + len(child.key)])
            node, length = child, length + shared
            self._touch(node)
            if length < node.end:
                break
        return node, length

    def _touch(self, node: Node) -> None:
        node.last_use = self._clock
        self._offer(node)

    def _tail_page(self, node: Node, length: int) -> PageId:
        """The page with the tokens of `length` behind the last whole span; `node` is where the walk ended."""
        span = self._layout.span(length)
        while True:
            index = span - self._layout.span(node.start)
            if index < len(node.pages):
                return node.pages[index]
            node = next(iter(node.children.values()))

    def _path_pages(self, node: Node) -> list[PageId]:
        path: list[Node] = []
        step: Node | None = node
        while step is not None:
            path.append(step)
            step = step.parent
        return [page for step in reversed(path) for page in step.pages]

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` at position `at`; returns the upper part. The lower part stays the same object."""
        assert node.start < at < node.end
        cut = at - node.start
        first_lower = self._layout.span(at) - self._layout.span(node.start)
        parent = self._parent(node)
        upper = Node(
            node.key[:cut],
            node.start,
            node.pages[:first_lower],
            parent,
            self._next_seq(),
            node.last_use,
            node.locks,
            {node.key[cut]: node},
        )
        parent.children[node.key[0]] = upper
        self._num_nodes += 1
        node.key, node.start, node.parent = node.key[cut:], at, upper
        node.pages = node.pages[first_lower:]
        return upper

    def _cut(self, leaf: Node, count: int) -> int:
        """Free `count` pages from the end of `leaf`, or all of it; returns how many became free."""
        keep = len(leaf.pages) - count
        if keep > 0:
            end = (self._layout.span(leaf.start) + keep) * self._layout.span_tokens
            leaf.key = leaf.key[: end - leaf.start]
            freed = leaf.pages[keep:]
            del leaf.pages[keep:]
            self._give_back(leaf, freed)
            self._offer(leaf)
            return len(freed)
        parent = self._parent(leaf)
        del parent.children[leaf.key[0]]
        leaf.parent = None
        self._num_nodes -= 1
        freed = leaf.pages
        if parent.is_root:
            self._drop_if_empty(parent)
        elif not parent.children:
            if self._layout.in_span(parent.end):
                parent.pages.append(freed[0])
                freed = freed[1:]
            self._offer(parent)
        self._give_back(leaf, freed)
        return len(freed)

    def _give_back(self, node: Node, pages: list[PageId]) -> None:
        assert not node.locks
        self._evictable -= len(pages)
        self._allocator.free(pages)

    def _is_free_leaf(self, node: Node) -> bool:
        return node.parent is not None and not node.children and not node.locks

    def _offer(self, node: Node) -> None:
        """Make `node` a candidate for eviction, if it is one; stale entries are skipped when they come up."""
        if self._is_free_leaf(node):
            heapq.heappush(self._candidates, (node.last_use, node.seq, node))
        if len(self._candidates) > 64 + 4 * self._num_nodes:
            self._candidates = [(n.last_use, n.seq, n) for n in self.nodes() if self._is_free_leaf(n)]
            heapq.heapify(self._candidates)

    def _drop_if_empty(self, root: Node) -> None:
        """Forget a namespace in which nothing is cached or locked."""
        if root in self._names and not root.children and not root.locks:
            del self._roots[self._names.pop(root)]

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    @staticmethod
    def _parent(node: Node) -> Node:
        assert node.parent is not None
        return node.parent
