"""Prompts of many lengths, some of which begin alike, so that the prefix cache takes part."""

from __future__ import annotations

import random

from dcprt.tokenizer.text import TextCodec

SENTENCES = (
    "The Loire rises in the mountains of the Ardeche and reaches the ocean at Saint-Nazaire.",
    "A list in Python keeps its elements in order; a set does not, but finds them faster.",
    "In 1969, two astronauts walked on the Moon for two hours and thirty-one minutes.",
    "She opened the window, looked at the rain, and decided to stay at home that day.",
    "Water boils at 100 degrees Celsius at sea level, and at 93 degrees in Denver.",
    "def area(width, height):\n    return width * height\n",
    "Bread needs flour, water, salt and time; everything else is a matter of taste.",
    "The committee met on 12 March, and again on 7 April, without reaching a decision.",
    "Whales breathe air, sing for hours, and cross whole oceans twice a year.",
    "To sort the numbers 5, 3, 9 and 1, compare neighbours and swap them if need be.",
    "The old bridge was closed in winter because ice made the stones slippery.",
    "Light takes eight minutes and twenty seconds from the Sun to the Earth.",
)
LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 33, 63, 64, 65, 100, 151, 257, 400, 700, 1023, 2049, 3000)
QUICK = (0, 3, 7, 10, 14)
"""Which of the prompts the quick tests use."""


def make_prompts(codec: TextCodec) -> list[list[int]]:
    """One prompt for each of `LENGTHS`. Every third one begins like the longest."""
    shared = _tokens(codec, 0, max(LENGTHS))
    return [
        shared[:length] if index % 3 == 1 else _tokens(codec, index + 1, length) for index, length in enumerate(LENGTHS)
    ]


def _tokens(codec: TextCodec, seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += codec.encode(" " + chosen.choice(SENTENCES))
    return tokens[:length]
