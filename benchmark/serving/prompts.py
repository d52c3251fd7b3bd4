"""Prompts as sequences of pieces whose tokens follow from their names: equal pieces are equal tokens.

A workload says which prompts share what; tokens are made when a request is about to be sent, since those of a long
trace would fill gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

# one token each, or little more, in the usual vocabularies
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money story
fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face level office door health
"""
WORDS = _COMMON.split()


class Source(IntEnum):
    """What a piece belongs to; pieces of different sources never share tokens on purpose."""

    UNIQUE = 0
    PREFIX = 1
    TRACE = 2
    WARMUP = 3


@dataclass(frozen=True)
class Piece:
    """The first `length` tokens of an endless sequence that has a name."""

    source: Source
    number: int
    length: int


Prompt = tuple[Piece, ...]


def length(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    return sum(piece.length for piece in prompt)


def cut(prompt: Prompt, limit: int) -> Prompt:
    """The first `limit` tokens of a prompt."""
    kept: list[Piece] = []
    for piece in prompt:
        if limit <= 0:
            break
        kept.append(Piece(piece.source, piece.number, min(piece.length, limit)))
        limit -= piece.length
    return tuple(kept)


@dataclass(frozen=True)
class Vocabulary:
    """Random token ids from `low` up to, not including, `high`; another seed gives other tokens to every piece."""

    low: int
    high: int
    seed: int

    def tokens(self, prompt: Prompt) -> NDArray[np.int32]:
        """The token ids of a prompt."""
        return np.concatenate([np.zeros(0, np.int32), *(self._piece(piece) for piece in prompt)])

    def text(self, prompt: Prompt) -> str:
        """As many words as the prompt has tokens, for servers that take no ids; equal pieces are equal text."""
        return " ".join(WORDS[token % len(WORDS)] for token in self.tokens(prompt).tolist())

    def _piece(self, piece: Piece) -> NDArray[np.int32]:
        chosen = np.random.default_rng((self.seed, piece.source, piece.number))
        return chosen.integers(self.low, self.high, piece.length, dtype=np.int32)


@dataclass(slots=True)
class _Node:
    """Prompts that were equal up to here: the longest piece by name, and what came behind whole pieces."""

    longest: dict[tuple[Source, int], int] = field(default_factory=dict)
    behind: dict[Piece, _Node] = field(default_factory=dict)


class IdealCache:
    """A prefix cache without a limit that matches single tokens, and holds a prompt as soon as it was sent.

    No server does better on prompts alone. The last token of a prompt is never matched: it has to be computed for the
    first output. Output tokens, which the next prompt of a conversation may repeat, are not in it: a trace does not
    tell which they were.
    """

    def __init__(self) -> None:
        self._root = _Node()

    def matched(self, prompt: Prompt) -> int:
        """Tokens of `prompt` that earlier prompts had in the same places; from now on it is one of those."""
        node, hit, matches = self._root, 0, True
        for piece in prompt:
            name = piece.source, piece.number
            known = node.longest.get(name, 0)
            if matches:
                hit += min(known, piece.length)
                matches = piece in node.behind
            node.longest[name] = max(known, piece.length)
            node = node.behind.setdefault(piece, _Node())
        return min(hit, length(prompt) - 1)


def ideal_hit_rate(prompts: Iterable[Prompt]) -> float:
    """Tokens that an ideal cache has, per prompt token, for prompts in this order."""
    cache = IdealCache()
    total = hit = 0
    for prompt in prompts:
        total += length(prompt)
        hit += cache.matched(prompt)
    return hit / max(total, 1)
