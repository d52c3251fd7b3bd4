"""From logits to tokens. A row's choice depends on its logits, its parameters, its seed and its position only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt.messages import RowSampling


@dataclass(frozen=True)
class SampleRow:
    """`position` is that of the token to be chosen."""

    params: RowSampling
    position: int


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position: 53 bits of their BLAKE2b hash."""
    data = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) / 2**53


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """float32 logits [rows, vocab] to one token a row."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for i, row in enumerate(rows):
        if row.params.temperature > 0:
            tokens[i] = _draw(logits[i], row)
    return tokens


def _draw(logits: Tensor, row: SampleRow) -> int:
    """Temperature, then top-k, then top-p, then the inverse of the cumulative distribution, likeliest first."""
    params = row.params
    scaled = logits / params.temperature
    if 0 < params.top_k < len(scaled):
        values, order = scaled.topk(params.top_k)
    else:
        values, order = scaled.sort(descending=True, stable=True)
    cumulative = (values.double() - values[0]).exp().cumsum(0)
    total = cumulative[-1]
    if params.top_p < 1:
        kept = int(torch.searchsorted(cumulative, params.top_p * total)) + 1
        cumulative = cumulative[:kept]
        total = cumulative[-1]
    drawn = uniform(params.seed, row.position) * total
    index = min(int(torch.searchsorted(cumulative, drawn, right=True)), len(cumulative) - 1)
    return int(order[index])
