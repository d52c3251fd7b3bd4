from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcprt.errors import RequestError
from dcprt.tokenizer.stops import StopMatcher


def feed(stops: list[str], parts: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    emitted = [matcher.push(part) for part in parts]
    emitted.append(matcher.flush())
    return "".join(emitted), matcher.matched, emitted


def brute_force(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            stop = max(ends, key=len)
            return text[: end - len(stop)], stop
    return text, None


SHORT = st.text(alphabet="ab\n", max_size=6)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(SHORT.filter(bool), max_size=4),
    text=st.text(alphabet="ab\nc", max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_against_brute_force_however_it_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    emitted, matched, _ = feed(stops, parts)
    assert (emitted, matched) == brute_force(stops, text)


@settings(max_examples=300, deadline=None)
@given(stops=st.lists(SHORT.filter(bool), min_size=1, max_size=4), text=st.text(alphabet="ab\n", max_size=30))
def test_holds_back_no_more_than_needed(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for at, character in enumerate(text):
        emitted += matcher.push(character)
        if matcher.matched is not None:
            return
        seen = text[: at + 1]
        held = max(n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
        assert emitted == seen[: len(seen) - held]


def test_no_fragment_is_ever_passed() -> None:
    emitted, matched, parts = feed(["Observation"], ["Thought: x\n", "Obs", "ervation", ": more", " text"])
    assert (emitted, matched) == ("Thought: x\n", "Observation")
    assert parts == ["Thought: x\n", "", "", "", "", ""]


def test_a_beginning_that_leads_nowhere_is_passed() -> None:
    assert feed(["Observation"], ["Obs", "olete"])[0] == "Obsolete"
    assert feed(["aab"], ["aa", "ab", "c"]) == ("a", "aab", ["", "a", "", ""])


def test_first_complete_match_counts() -> None:
    assert feed(["bc", "abcd"], ["abcd"])[:2] == ("a", "bc")
    assert feed(["c", "abc"], ["xab", "c"])[:2] == ("x", "abc")
    assert feed(["END", "STOP"], ["a STOP b END"])[:2] == ("a ", "STOP")


def test_without_stops_nothing_is_held() -> None:
    assert feed([], ["a", "b"]) == ("ab", None, ["a", "b", ""])


def test_empty_stop_string() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["x", ""])
