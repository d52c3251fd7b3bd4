"""The radix cache against brute force: whatever it returns must hold the KV of exactly that prefix."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcprt.ids import PageId
from dcprt.kv.allocator import PageAllocator
from dcprt.kv.layout import Layout
from dcprt.kv.radix import Match, Node, RadixCache, common_len

from ..hypothesis_profile import search
from .content import Pages, digests, start

NAMESPACES = ["", "salt"]
LAYOUTS = [
    Layout(1, 1, 1), Layout(2, 1, 1), Layout(1, 3, 1), Layout(4, 1, 4), Layout(2, 4, 1), Layout(5, 3, 5),
    Layout(4, 4, 2), Layout(16, 2, 1), Layout(7, 7, 1), Layout(16, 4, 1), Layout(8, 8, 4), Layout(64, 1, 1),
]  # fmt: skip


@dataclass(eq=False)
class Running:
    """A request that holds a lock and pages, as the scheduler would."""

    name: str
    namespace: str
    tokens: list[int]
    node: Node
    pages: list[PageId]
    computed: int
    owned: set[PageId] = field(default_factory=set)

    def prefix(self) -> list[int]:
        return digests(self.tokens[: self.computed], start(self.namespace))


class RadixMachine(RuleBasedStateMachine):
    """Concurrent requests over a cache; `cached` is the set of prefixes that must be there, by digest."""

    @initialize(layout=st.sampled_from(LAYOUTS), pages=st.integers(2, 40))
    def begin(self, layout: Layout, pages: int) -> None:
        self.layout = layout
        self.allocator = PageAllocator(pages)
        self.cache = RadixCache(layout, self.allocator)
        self.content = Pages(layout)
        self.cached: set[int] = set()
        self.running: list[Running] = []
        self.known: list[list[int]] = [[]]
        self.transfers: list[str] = []
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def sequence(self, seed: int, cut: int, runs: list[tuple[int, int]]) -> list[int]:
        """A prefix of something known, then runs of equal tokens; sometimes cut to a span."""
        base = self.known[seed % len(self.known)]
        tokens = base[: cut % (len(base) + 1)]
        for token, count in runs:
            tokens = tokens + [token] * count
        self.known.append(tokens)
        return tokens

    def verify(self, namespace: str, tokens: list[int], match: Match) -> None:
        """By content, and against the model's longest cached prefix."""
        prefix = digests(tokens, start(namespace))
        longest = next((n for n, digest in enumerate(prefix) if digest not in self.cached), len(prefix))
        assert match.length == longest, (match.length, longest)
        whole = self.layout.floor_to_span(longest)
        assert len(match.pages) == self.layout.whole_spans(longest)
        assert match.node.end == whole
        assert self.content.read(match.pages, whole) == prefix[:whole]
        assert (match.tail is not None) == (longest > whole)
        if match.tail is not None:
            assert match.tail not in match.pages
            read = self.content.read([*match.pages, match.tail], longest, whole)
            assert read == prefix[whole:longest]

    def evict(self, count: int) -> None:
        """Evict, and forget what is gone; no more may go than was asked for, and nothing that is locked."""
        evictable, free = self.cache.evictable_pages, self.allocator.free_pages
        freed = self.cache.evict(count)
        assert freed == min(count, evictable)
        assert self.allocator.free_pages <= free + freed
        assert self.cache.evictable_pages == evictable - freed
        left = self.tree()
        assert left <= self.cached
        assert (left == self.cached) == (freed == 0)
        for request in self.running:
            assert set(request.prefix()[: request.node.end]) <= left
        self.cached = left

    def tree(self) -> set[int]:
        """Digests of all prefixes in the tree; proves on the way that every node's pages hold them."""
        found: set[int] = set()
        stack = [(root, [], []) for root in self.cache._roots.values()]
        seeds = {root: start(name) for name, root in self.cache._roots.items()}
        while stack:
            node, path_tokens, path_pages = stack.pop()
            root = node
            while root.parent is not None:
                root = root.parent
            tokens, pages = [*path_tokens, *node.key], [*path_pages, *node.pages]
            prefix = digests(tokens, seeds[root])
            first = self.layout.floor_to_span(node.start)
            stored = min(len(pages) * self.layout.span_tokens, node.end)
            assert self.content.read(pages, stored, first) == prefix[first:stored]
            found.update(prefix)
            stack.extend((child, tokens, pages) for child in node.children.values())
        return found

    def take(self, count: int) -> list[PageId] | None:
        """Pages, evicting for them if need be."""
        while count > self.allocator.free_pages and self.cache.evictable_pages:
            self.evict(count - self.allocator.free_pages)
        return self.allocator.alloc(count) if count <= self.allocator.free_pages else None

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        seed=st.integers(0, 20),
        cut=st.integers(0, 400),
        runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), max_size=3),
        to_span=st.booleans(),
        keep_tail=st.booleans(),
    )
    def admit(
        self, namespace: str, seed: int, cut: int, runs: list[tuple[int, int]], to_span: bool, keep_tail: bool
    ) -> None:
        tokens = self.sequence(seed, cut, runs)
        if to_span:
            tokens = tokens[: self.layout.floor_to_span(len(tokens))]
        match = self.cache.match(namespace, array("i", tokens))
        self.verify(namespace, tokens, match)
        self.cache.lock(match.node)
        whole = self.layout.floor_to_span(match.length)
        request = Running(self.name(), namespace, tokens, match.node, list(match.pages), whole)
        self.running.append(request)
        if match.tail is not None and keep_tail:
            transfer = f"plan {request.name}"
            self.allocator.pin(transfer, match.tail)
            self.transfers.append(transfer)
            pages = self.take(1)
            if pages is not None:
                assert pages[0] != match.tail
                self.content.copy(match.tail, pages[0], match.length - whole)
                request.pages += pages
                request.owned |= set(pages)
                request.computed = match.length

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), count=st.integers(1, 80), token=st.integers(0, 2))
    def compute(self, which: int, count: int, token: int) -> None:
        """More of a request's tokens; new ones when the known are all computed."""
        request = self.running[which % len(self.running)]
        if request.computed == len(request.tokens):
            request.tokens = [*request.tokens, token, token]
        stop = min(request.computed + count, len(request.tokens))
        pages = self.take(self.layout.pages_for(stop) - len(request.pages))
        if pages is None:
            return
        request.pages += pages
        request.owned |= set(pages)
        touched = request.pages[self.layout.span(request.computed) : self.layout.pages_for(stop)]
        assert set(touched) <= request.owned
        first, request.computed = request.computed, stop
        self.content.write(request.pages, first, request.prefix()[first:])

    def insert(self, request: Running, length: int) -> Node:
        pages = request.pages[: self.layout.pages_for(length)]
        node, kept = self.cache.insert(request.namespace, array("i", request.tokens[:length]), pages)
        assert set(pages[kept:]) <= request.owned
        request.owned -= set(pages[kept:])
        self.cached |= set(request.prefix()[:length])
        return node

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def share(self, which: int) -> None:
        """Whole spans of a running request become the tree's, and stay locked."""
        request = self.running[which % len(self.running)]
        node = self.insert(request, self.layout.floor_to_span(request.computed))
        if self.layout.in_span(node.end) == 0:
            self.cache.lock(node)
            self.cache.unlock(request.node)
            request.node = node

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), insert=st.booleans(), part=st.integers(0, 200))
    def finish(self, which: int, insert: bool, part: int) -> None:
        """Whole, cut somewhere behind the lock, or with nothing kept."""
        request = self.running.pop(which % len(self.running))
        if insert and request.computed:
            low = request.node.end
            self.insert(request, low + part % (request.computed - low + 1) if part % 2 else request.computed)
        self.cache.unlock(request.node)
        self.allocator.free(sorted(request.owned))
        self.known.append(request.tokens)

    @rule(count=st.integers(0, 12))
    def evict_some(self, count: int) -> None:
        self.evict(count)

    @rule(namespace=st.sampled_from(NAMESPACES), seed=st.integers(0, 20), cut=st.integers(0, 400))
    def forget(self, namespace: str, seed: int, cut: int) -> None:
        """What is left is what was there but for ends of the sequence; nothing that is locked goes."""
        tokens = self.sequence(seed, cut, [])
        evictable, free = self.cache.evictable_pages, self.allocator.free_pages
        self.cache.forget(namespace, array("i", tokens))
        left = self.tree()
        assert left <= self.cached
        assert self.allocator.free_pages - free <= evictable - self.cache.evictable_pages
        for request in self.running:
            assert set(request.prefix()[: request.node.end]) <= left
        self.cached = left

    @rule()
    def flush(self) -> None:
        evictable = self.cache.evictable_pages
        assert self.cache.flush() == evictable
        assert self.cache.evictable_pages == 0
        self.cached = self.tree()
        assert self.cached == {d for r in self.running for d in r.prefix()[: r.node.end]}

    @precondition(lambda self: self.transfers)
    @rule(which=st.integers(0, 9))
    def end_transfer(self, which: int) -> None:
        self.allocator.end_transfer(self.transfers.pop(which % len(self.transfers)))

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        seed=st.integers(0, 20),
        cut=st.integers(0, 400),
        token=st.integers(0, 2),
        more=st.integers(0, 3),
    )
    def probe(self, namespace: str, seed: int, cut: int, token: int, more: int) -> None:
        tokens = self.sequence(seed, cut, [(token, more)])
        self.verify(namespace, tokens, self.cache.match(namespace, array("i", tokens)))

    @invariant()
    def accounts_and_contents_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        self.allocator.check(self.cache.pages(), {r.name: r.owned for r in self.running})
        assert self.tree() == self.cached
        for request in self.running:
            assert self.content.read(request.pages, request.computed) == request.prefix()


TestRadix = RadixMachine.TestCase
TestRadix.settings = search(120, steps=30)


class Cache:
    """A cache to which whole sequences are written at once; for directed tests."""

    def __init__(self, layout: Layout, num_pages: int = 64) -> None:
        self.layout = layout
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixCache(layout, self.allocator)
        self.lengths: dict[str, int] = {}

    def put(self, text: str, namespace: str = "") -> list[PageId]:
        """Insert; returns the pages that hold `text`, before the tree kept its own."""
        pages = self.allocator.alloc(self.layout.pages_for(len(text)))
        _, kept = self.tree.insert(namespace, tokens_of(text), pages)
        self.allocator.free(pages[:kept])
        self.check()
        return pages

    def find(self, text: str, namespace: str = "") -> Match:
        match = self.tree.match(namespace, tokens_of(text))
        self.check()
        return match

    def length(self, text: str, namespace: str = "") -> int:
        return self.find(text, namespace).length

    def evict(self, count: int) -> int:
        freed = self.tree.evict(count)
        self.check()
        return freed

    def check(self) -> None:
        self.tree.check()
        self.allocator.check(self.tree.pages(), {})

    def texts(self) -> set[str]:
        """The edges of the tree."""
        return {"".join(map(chr, node.key)) for node in self.tree.nodes()}


def tokens_of(text: str) -> array[int]:
    return array("i", map(ord, text))


def test_whole_spans_are_shared_and_the_rest_is_a_tail_to_copy() -> None:
    cache = Cache(Layout(2, 2))
    pages = cache.put("abcdefghij")
    match = cache.find("abcdefghXX")
    assert (match.length, match.pages, match.tail) == (8, pages[:2], None)
    match = cache.find("abcdefgXX")
    assert (match.length, match.pages, match.tail) == (7, pages[:1], pages[1])
    match = cache.find("abcdefghijk")
    assert (match.length, match.pages, match.tail) == (10, pages[:2], pages[2])
    match = cache.find("Xabc")
    assert (match.length, match.pages, match.tail) == (0, [], None)


def test_k1_a_hit_ends_at_the_first_different_token_inside_a_span() -> None:
    cache = Cache(Layout(16, 2))
    pages = cache.put("a" * 150 + "b" * 400)
    match = cache.find("a" * 150 + "c" * 400)
    assert (match.length, match.pages, match.tail) == (150, pages[:4], pages[4])


def test_k13_namespaces_share_nothing() -> None:
    cache = Cache(Layout(2))
    cache.put("abcdef", "one")
    assert cache.length("abcdef", "one") == 6
    assert cache.length("abcdef", "two") == 0
    assert cache.length("abcdef") == 0
    cache.put("abcdef", "two")
    assert len(list(cache.tree.pages())) == 6
    cache.tree.flush()
    assert [cache.length("abcdef", name) for name in ("", "one", "two")] == [0, 0, 0]


def test_what_is_there_already_stays_with_the_caller() -> None:
    cache = Cache(Layout(2))
    cache.put("abcdef")
    free = cache.allocator.free_pages
    for text in ["abcdef", "abcde", "abcd", "a"]:
        cache.put(text)
        assert cache.allocator.free_pages == free
        assert cache.length("abcdef") == 6


def test_a_partial_tail_gives_way_to_the_page_that_goes_on() -> None:
    cache = Cache(Layout(4))
    first = cache.put("abcdef")
    second = cache.put("abcdefghi")
    assert set(cache.tree.pages()) == {first[0], *second[1:]}
    assert cache.length("abcdefghi") == 9


def test_a_split_inside_a_span_is_served_from_any_child() -> None:
    cache = Cache(Layout(4))
    first = cache.put("abcdef")
    second = cache.put("abcdeXY")
    match = cache.find("abcdeQ")
    assert (match.length, match.pages) == (5, [first[0]])
    assert match.tail in (first[1], second[1])
    assert cache.texts() == {"abcd", "e", "f", "XY"}


@pytest.mark.parametrize("text", ["abcdeQ", "abcde", "abcdQ"])
def test_the_tail_is_the_first_page_of_a_long_child(text: str) -> None:
    cache = Cache(Layout(4))
    first = cache.put("abcdefghijklmno")
    second = cache.put("abcdeXXXXXXXXXX")
    match = cache.find(text)
    assert match.pages == [first[0]]
    assert match.length == len(text.rstrip("Q"))
    assert match.tail in ((first[1], second[1]) if match.length % 4 else (None,))


def test_the_last_child_leaves_its_straddling_page_to_the_parent() -> None:
    cache = Cache(Layout(4))
    first = cache.put("abcdef")
    second = cache.put("abcdeXY")
    cache.length("abcdeXY")
    assert cache.evict(1) == 1
    assert cache.length("abcdef") == 5
    assert cache.find("abcdeXY").tail == second[1]
    assert cache.evict(1) == 1
    assert cache.find("abcdeXY").pages == [first[0]]
    assert cache.length("abcdeXY") == 4


def test_a_straddling_page_moves_up_and_the_pages_behind_it_go() -> None:
    cache = Cache(Layout(4))
    cache.put("abX")
    pages = cache.put("abcdefgh")
    cache.put("zz")
    cache.find("abQ")
    assert cache.texts() == {"ab", "X", "cdefgh", "zz"}
    assert cache.evict(3) == 3
    assert cache.texts() == {"ab"}
    match = cache.find("abcdefgh")
    assert (match.length, match.pages, match.tail) == (2, [], pages[0])


def test_a_single_page_leaf_moves_up_without_freeing_anything_and_eviction_goes_on() -> None:
    cache = Cache(Layout(8))
    cache.put("abc")
    cache.put("abcde")
    assert cache.texts() == {"abc", "de"}
    assert cache.evict(1) == 1
    assert cache.texts() == set()
    assert cache.allocator.free_pages == cache.allocator.capacity


def test_leaves_go_by_last_use() -> None:
    cache = Cache(Layout(2))
    for text in ["aa", "bb", "cc", "dd"]:
        cache.put(text)
    cache.find("bb")
    cache.find("aa")
    gone = []
    while cache.evict(1):
        left = cache.texts()
        gone.append(({"aa", "bb", "cc", "dd"} - left - set(gone)).pop())
    assert gone == ["cc", "dd", "bb", "aa"]


def test_children_go_before_their_parents() -> None:
    cache = Cache(Layout(2))
    cache.put("aabb")
    cache.put("aacc")
    cache.put("zz")
    assert cache.evict(1) == 1
    assert cache.texts() == {"aa", "cc", "zz"}
    assert cache.evict(1) == 1
    assert cache.texts() == {"aa", "zz"}
    assert cache.evict(1) == 1
    assert cache.texts() == {"zz"}


def test_equal_last_use_goes_by_age_of_the_node_the_same_every_time() -> None:
    orders = []
    for _ in range(3):
        cache = Cache(Layout(1))
        cache.put("xa")
        cache.put("xb")
        order = []
        for _ in range(3):
            before = cache.texts()
            cache.evict(1)
            order.append(before - cache.texts())
        orders.append(order)
    assert orders == [[{"a"}, {"b"}, {"x"}]] * 3


def test_a_use_after_many_others_still_counts() -> None:
    cache = Cache(Layout(2))
    for text in ["aa", "bb", "cc"]:
        cache.put(text)
    for _ in range(500):
        cache.find("aa")
        cache.find("bb")
    assert cache.evict(1) == 1
    assert cache.texts() == {"aa", "bb"}
    assert cache.evict(1) == 1
    assert cache.texts() == {"bb"}


def test_the_candidates_do_not_pile_up() -> None:
    cache = Cache(Layout(2))
    cache.put("aa")
    for _ in range(10_000):
        cache.tree.match("", tokens_of("aa"))
    assert len(cache.tree._candidates) < 200


def test_a_long_leaf_is_trimmed_from_its_end() -> None:
    cache = Cache(Layout(2, 2))
    pages = cache.put("abcdefghijklmnopqrstu")
    assert cache.evict(1) == 1
    assert cache.find("abcdefghijklmnopqrstu").length == 20
    assert cache.evict(2) == 2
    match = cache.find("abcdefghijklmnopqrstu")
    assert (match.length, match.pages, match.tail) == (12, pages[:3], None)
    cache.put("abcdefghijklmnopqrstu")
    assert cache.length("abcdefghijklmnopqrstu") == 21


def test_a_trimmed_leaf_that_starts_inside_a_span_keeps_its_straddling_page() -> None:
    cache = Cache(Layout(4))
    cache.put("ab")
    pages = cache.put("abcdefghijkl")
    assert cache.evict(2) == 2
    match = cache.find("abcdefghijkl")
    assert (match.length, match.pages) == (4, pages[:1])


def test_a_locked_path_stays_and_can_go_once_unlocked() -> None:
    cache = Cache(Layout(2))
    cache.put("aabbcc")
    match = cache.find("aabbX")
    cache.tree.lock(match.node)
    assert cache.tree.evictable_pages == 1
    assert cache.evict(9) == 1
    assert cache.length("aabbcc") == 4
    cache.tree.unlock(match.node)
    assert cache.evict(9) == 2
    assert cache.length("aabbcc") == 0


def test_what_is_forgotten_goes_up_to_what_others_hold_or_share() -> None:
    cache = Cache(Layout(2))
    cache.put("aabbccdd")
    cache.put("aabbXX")
    cache.tree.forget("", tokens_of("aabbccd"))
    cache.check()
    assert (cache.length("aabbccdd"), cache.length("aabbXX")) == (4, 6)
    match = cache.find("aaX")
    cache.tree.lock(match.node)
    cache.tree.forget("", tokens_of("aabbXX"))
    cache.check()
    assert cache.length("aabbXX") == 2
    cache.tree.unlock(match.node)
    cache.tree.forget("other", tokens_of("aa"))
    cache.tree.forget("", tokens_of("aa"))
    cache.check()
    assert (cache.length("aa"), cache.tree.evictable_pages) == (0, 0)


def test_a_path_that_two_hold_stays_until_both_are_gone() -> None:
    cache = Cache(Layout(2))
    cache.put("aabbcc")
    long, short = cache.find("aabbcc"), cache.find("aaX")
    cache.tree.lock(long.node)
    cache.tree.lock(short.node)
    cache.tree.unlock(long.node)
    assert cache.evict(9) == 2
    assert cache.length("aabb") == 2
    cache.tree.unlock(short.node)
    assert cache.evict(9) == 1


def test_a_split_of_a_locked_edge_keeps_both_parts_locked() -> None:
    cache = Cache(Layout(4))
    cache.put("abcdefgh")
    match = cache.find("abcdefgh")
    cache.tree.lock(match.node)
    cache.put("abXXXXXX")
    cache.put("abcdeY")
    assert cache.tree.flush() == 3
    assert cache.find("abcdefgh").pages == match.pages
    cache.tree.unlock(match.node)
    cache.check()
    assert cache.tree.flush() == 2


def test_a_lock_inside_a_span_is_a_bug() -> None:
    cache = Cache(Layout(4))
    cache.put("abc")
    node = next(cache.tree.nodes())
    with pytest.raises(AssertionError):
        cache.tree.lock(node)


def test_pages_of_the_wrong_number_are_a_bug() -> None:
    cache = Cache(Layout(4))
    with pytest.raises(AssertionError):
        cache.tree.insert("", tokens_of("abcde"), cache.allocator.alloc(1))


def test_namespaces_that_left_nothing_are_forgotten() -> None:
    cache = Cache(Layout(2))
    for i in range(50):
        match = cache.tree.match(f"salt {i}", tokens_of("aa"))
        cache.tree.lock(match.node)
        cache.tree.unlock(match.node)
    cache.put("aa", "kept")
    assert set(cache.tree._roots) == {"kept"}


@given(
    shared=st.lists(st.integers(0, 2), max_size=40),
    a=st.lists(st.integers(0, 1), max_size=20),
    b=st.lists(st.integers(0, 1), max_size=20),
)
@search(300)
def test_common_len(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_len(array("i", left), array("i", right)) == expected
