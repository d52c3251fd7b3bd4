"""The page allocator against a model that says of every page in which one place it is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcprt.ids import NULL_PAGE, PageId
from dcprt.kv.allocator import PageAllocator

from ..hypothesis_profile import search

HOLDERS = ["r1", "r2", "free", "cached", "transfer"]
TRANSFERS = ["plan 1", "plan 2", "plan 3"]


class AllocatorMachine(RuleBasedStateMachine):
    """Pages move between holders, the cache and transfers; requests may have any name."""

    def __init__(self) -> None:
        super().__init__()
        self.free: set[PageId] = set()
        self.cached: set[PageId] = set()
        self.owned: dict[str, set[PageId]] = {holder: set() for holder in HOLDERS}
        self.reads: dict[str, Counter[PageId]] = {transfer: Counter() for transfer in TRANSFERS}
        self.zombies: set[PageId] = set()

    @initialize(pages=st.integers(2, 12))
    def start(self, pages: int) -> None:
        self.allocator = PageAllocator(pages)
        self.free = {PageId(page) for page in range(1, pages)}

    def is_read(self, page: PageId) -> bool:
        return any(reads[page] for reads in self.reads.values())

    def pick(self, pages: set[PageId], seed: int) -> PageId:
        return sorted(pages)[seed % len(pages)]

    @rule(holder=st.sampled_from(HOLDERS), count=st.integers(0, 5))
    def alloc(self, holder: str, count: int) -> None:
        count = min(count, len(self.free))
        pages = self.allocator.alloc(count)
        assert len(set(pages)) == count
        assert set(pages) <= self.free
        assert NULL_PAGE not in pages
        self.free -= set(pages)
        self.owned[holder] |= set(pages)

    @rule(holder=st.sampled_from(HOLDERS), seed=st.integers(0, 99))
    def cache_one(self, holder: str, seed: int) -> None:
        if self.owned[holder]:
            page = self.pick(self.owned[holder], seed)
            self.owned[holder].remove(page)
            self.cached.add(page)

    @rule(holder=st.sampled_from(HOLDERS))
    def free_a_holder(self, holder: str) -> None:
        pages, self.owned[holder] = self.owned[holder], set()
        self.give_back(pages)

    @precondition(lambda self: self.cached)
    @rule(seed=st.integers(0, 99))
    def evict_one(self, seed: int) -> None:
        page = self.pick(self.cached, seed)
        self.cached.remove(page)
        self.give_back({page})

    def give_back(self, pages: set[PageId]) -> None:
        self.allocator.free(sorted(pages))
        read = {page for page in pages if self.is_read(page)}
        self.zombies |= read
        self.free |= pages - read

    @precondition(lambda self: self.cached)
    @rule(transfer=st.sampled_from(TRANSFERS), seed=st.integers(0, 99))
    def pin(self, transfer: str, seed: int) -> None:
        page = self.pick(self.cached, seed)
        self.allocator.pin(transfer, page)
        self.reads[transfer][page] += 1

    @rule(transfer=st.sampled_from([*TRANSFERS, "never started"]))
    def end_transfer(self, transfer: str) -> None:
        self.allocator.end_transfer(transfer)
        self.reads[transfer] = Counter()
        done = {page for page in self.zombies if not self.is_read(page)}
        self.zombies -= done
        self.free |= done

    @precondition(lambda self: self.zombies)
    @rule(seed=st.integers(0, 99))
    def freeing_a_read_page_twice_is_a_bug(self, seed: int) -> None:
        with pytest.raises(AssertionError, match="freed twice"):
            self.allocator.free([self.pick(self.zombies, seed)])

    @invariant()
    def everything_is_in_one_place(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.free_pages == len(self.free)
            self.allocator.check(self.cached, self.owned)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = search(150, steps=40)


def test_page_0_is_never_given_out() -> None:
    allocator = PageAllocator(4)
    assert allocator.capacity == 3
    assert sorted(allocator.alloc(3)) == [1, 2, 3]
    with pytest.raises(AssertionError):
        allocator.alloc(1)
    with pytest.raises(AssertionError):
        allocator.free([NULL_PAGE])


def test_a_page_two_plans_read_is_free_after_the_second() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.alloc(1)
    allocator.pin("plan 1", page)
    allocator.pin("plan 2", page)
    allocator.free([page])
    assert allocator.free_pages == 0
    allocator.end_transfer("plan 1")
    assert allocator.free_pages == 0
    allocator.check([], {})
    allocator.end_transfer("plan 2")
    assert allocator.alloc(1) == [page]


def test_a_transfer_that_pins_a_page_twice_ends_both() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.alloc(1)
    allocator.pin("plan 1", page)
    allocator.pin("plan 1", page)
    allocator.free([page])
    allocator.end_transfer("plan 1")
    assert allocator.free_pages == 1


def test_a_pin_outlived_by_its_page_frees_nothing() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.alloc(1)
    allocator.pin("plan 1", page)
    allocator.end_transfer("plan 1")
    allocator.check([page], {})
    assert allocator.free_pages == 1


def test_check_names_lost_double_and_alien_pages() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.alloc(2)
    with pytest.raises(AssertionError, match=rf"lost: \[{second}\]"):
        allocator.check([first], {})
    with pytest.raises(AssertionError, match=rf"twice: .*{first}"):
        allocator.check([first, second], {"r1": [first]})
    with pytest.raises(AssertionError, match="twice"):
        allocator.check([first, second, first], {})
    with pytest.raises(AssertionError, match=r"out of range: \[9\]"):
        allocator.check([first, second], {"r1": [PageId(9)]})


def test_check_is_not_misled_by_the_name_of_a_request() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    for rid in ["free", "cached", "transfer"]:
        allocator.check([], {rid: pages})
