"""Layout against a token list that is laid out span by span, run by run, on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dcprt.ids import NULL_PAGE
from dcprt.kv.layout import Layout


@dataclass(frozen=True)
class Place:
    """Where brute force put a position."""

    span: int
    owner: int
    page_slot: int


def lay_out(layout: Layout, spans: int) -> list[Place]:
    """Place the positions of `spans` spans: `interleave` on one rank, then the next, until pages are full."""
    places: list[Place] = []
    for span in range(spans):
        filled = [0] * layout.dcp
        while filled[-1] < layout.page_size:
            for rank in range(layout.dcp):
                for _ in range(layout.interleave):
                    places.append(Place(span, rank, filled[rank]))
                    filled[rank] += 1
    return places


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


SMALL = [
    Layout(page_size, span // page_size, interleave)
    for span in range(1, 65)
    for page_size in divisors(span)
    for interleave in divisors(page_size)
]
K3 = [(Layout(16, 2, 16), 10), (Layout(16, 4, 16), 10), (Layout(16, 8, 16), 10), (Layout(16, 4, 1), 2)]


def test_all_spans_from_1_to_64_are_covered() -> None:
    assert {layout.span_tokens for layout in SMALL} == set(range(1, 65))


def test_positions_of_ints_and_arrays() -> None:
    for layout in SMALL:
        places = lay_out(layout, 3)
        positions = np.arange(len(places))
        spans, owners = layout.span(positions), layout.owner(positions)
        slots = layout.page_slot(positions)
        for pos, place in enumerate(places):
            assert (layout.span(pos), layout.owner(pos), layout.page_slot(pos)) == (
                place.span, place.owner, place.page_slot,
            ), (layout, pos)  # fmt: skip
            assert (spans[pos], owners[pos], slots[pos]) == (place.span, place.owner, place.page_slot)


def test_lengths() -> None:
    for layout in SMALL:
        stored = [0] * layout.dcp
        for length, place in enumerate([*lay_out(layout, 2), Place(2, 0, 0)]):
            assert [layout.local_len(rank, length) for rank in range(layout.dcp)] == stored, (layout, length)
            assert max(stored) - min(stored) <= layout.interleave
            stored[place.owner] += 1


def test_pages_and_spans_of_a_length() -> None:
    for layout in SMALL:
        places = lay_out(layout, 3)
        for length in range(len(places) + 1):
            used = {place.span for place in places[:length]}
            whole = [s for s in used if sum(p.span == s for p in places[:length]) == layout.span_tokens]
            assert layout.pages_for(length) == len(used)
            if length % 7 == 0 or length % layout.span_tokens < 2:
                assert layout.whole_spans(length) == len(whole)
                assert layout.floor_to_span(length) == len(whole) * layout.span_tokens
                assert layout.in_span(length) == length - len(whole) * layout.span_tokens
            for rank in {0, layout.dcp - 1}:
                local = layout.local_len(rank, length)
                pages = {p.span for p in places[:length] if p.owner == rank}
                assert layout.local_pages(local) == len(pages)


def test_local_positions_are_in_slot_order() -> None:
    for layout in SMALL:
        places = lay_out(layout, 3)
        for length in {0, 1, layout.interleave, layout.span_tokens + 1, len(places) - 1, len(places)}:
            for rank in range(layout.dcp):
                expected = [pos for pos in range(length) if places[pos].owner == rank]
                found = layout.local_positions(rank, length)
                assert found.tolist() == expected, (layout, rank, length)
                slots = layout.slots(found, np.arange(1, 4))
                assert np.all(np.diff(slots) == 1), (layout, rank, length)


def test_slots_are_unique_and_outside_page_0() -> None:
    random = np.random.default_rng(7)
    for layout in SMALL:
        places = lay_out(layout, 4)
        table = random.permutation(np.arange(1, 9))[:4]
        positions = np.arange(len(places))
        slots = layout.slots(positions, table)
        seen = set()
        for pos, place in enumerate(places):
            assert slots[pos] == table[place.span] * layout.page_size + place.page_slot
            seen.add((place.owner, int(slots[pos])))
        assert len(seen) == len(places)
        assert slots.min() >= (NULL_PAGE + 1) * layout.page_size
        for rank in range(layout.dcp):
            own = slots[layout.owner(positions) == rank]
            whole_pages = (table[:, None] * layout.page_size + np.arange(layout.page_size)).flatten()
            assert sorted(own) == sorted(whole_pages)


def test_the_example_of_the_design() -> None:
    layout = Layout(page_size=2, dcp=4, interleave=1)
    assert layout.span_tokens == 8
    assert [layout.span(pos) for pos in (0, 7, 8)] == [0, 0, 1]
    assert [layout.local_positions(rank, 8).tolist() for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.slots(np.arange(8), np.array([5])).tolist() == [10, 10, 10, 10, 11, 11, 11, 11]


@pytest.mark.parametrize(("layout", "context"), K3)
def test_k3_short_contexts_leave_some_ranks_empty(layout: Layout, context: int) -> None:
    places = lay_out(layout, 1)[:context]
    lengths = [layout.local_len(rank, context) for rank in range(layout.dcp)]
    assert lengths == [sum(place.owner == rank for place in places) for rank in range(layout.dcp)]
    assert sum(lengths) == context
    assert 0 in lengths
    empty = lengths.index(0)
    assert layout.local_positions(empty, context).tolist() == []
    assert layout.local_pages(0) == 0


def test_long_lengths_stay_balanced_and_complete() -> None:
    for layout in [Layout(16, 4, 1), Layout(16, 8, 4), Layout(16, 3, 16), Layout(64, 7, 8)]:
        for length in [999_983, 1_000_000, 1_048_576]:
            lengths = [layout.local_len(rank, length) for rank in range(layout.dcp)]
            assert sum(lengths) == length
            assert max(lengths) - min(lengths) <= layout.interleave
            owners = np.bincount(layout.owner(np.arange(length)), minlength=layout.dcp)
            assert owners.tolist() == lengths


def test_an_interleave_that_does_not_divide_the_page_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Layout(16, 2, 3)
