"""Pieces, their tokens, and what an ideal cache would reuse of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.prompts import WORDS, IdealCache, Piece, Prompt, Source, Vocabulary, cut, ideal_hit_rate, length

VOCABULARY = Vocabulary(1000, 30000, seed=7)

pieces = st.builds(Piece, st.sampled_from([Source.TRACE, Source.UNIQUE]), st.integers(0, 2), st.integers(1, 6))
prompts = st.lists(pieces, min_size=1, max_size=4).map(tuple)


def trace(*numbers: int, tokens: int = 4) -> Prompt:
    return tuple(Piece(Source.TRACE, number, tokens) for number in numbers)


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_equal_pieces_are_equal_tokens_and_others_are_not() -> None:
    first, second = VOCABULARY.tokens(trace(1, 2)).tolist(), VOCABULARY.tokens(trace(1, 3)).tolist()
    assert len(first) == 8
    assert common(first, second) == 4
    assert first == VOCABULARY.tokens(trace(1, 2)).tolist()
    assert first != Vocabulary(1000, 30000, seed=8).tokens(trace(1, 2)).tolist()
    assert first[:4] != VOCABULARY.tokens((Piece(Source.PREFIX, 1, 4),)).tolist()


@pytest.mark.parametrize("tokens", [1, 2, 3, 511, 513])
def test_a_shorter_piece_is_the_beginning_of_a_longer_one(tokens: int) -> None:
    long = VOCABULARY.tokens(trace(5, tokens=1024)).tolist()
    assert VOCABULARY.tokens(trace(5, tokens=tokens)).tolist() == long[:tokens]


def test_tokens_stay_in_their_range() -> None:
    tokens = Vocabulary(10, 13, seed=0).tokens(trace(*range(50)))
    assert tokens.dtype == np.int32
    assert set(tokens.tolist()) == {10, 11, 12}


def test_text_has_a_word_for_every_token() -> None:
    words = VOCABULARY.text(trace(1, 2)).split(" ")
    assert len(words) == 8
    assert set(words) <= set(WORDS)
    assert words[:4] == VOCABULARY.text(trace(1)).split(" ")


@given(prompts, st.integers(0, 30))
def test_a_cut_prompt_is_its_beginning(prompt: Prompt, limit: int) -> None:
    whole, part = VOCABULARY.tokens(prompt).tolist(), cut(prompt, limit)
    assert VOCABULARY.tokens(part).tolist() == whole[:limit]
    assert length(part) == min(limit, length(prompt))


@given(st.lists(prompts, max_size=8))
def test_the_ideal_cache_against_brute_force(asked: list[Prompt]) -> None:
    cache, earlier = IdealCache(), list[list[int]]()
    for prompt in asked:
        tokens = VOCABULARY.tokens(prompt).tolist()
        best = max((common(tokens, other) for other in earlier), default=0)
        assert cache.matched(prompt) == min(best, len(tokens) - 1)
        earlier.append(tokens)


def test_hit_rate_of_a_conversation() -> None:
    # of 4, 8 and 12 tokens, 0, 4 and 8 were there; of the same 12 again, all but the last
    assert ideal_hit_rate([trace(1), trace(1, 2), trace(1, 2, 3), trace(1, 2, 3)]) == (4 + 8 + 11) / 36
    assert ideal_hit_rate([]) == 0
