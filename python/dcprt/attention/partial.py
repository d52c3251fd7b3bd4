"""Attention results that can still be merged, and how they are.

Source of the formula: softmax over a union of key sets from the softmaxes over each, as in "Online normalizer
calculation for softmax" (Milakov and Gimelshein, 2018) and Flash-Decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys.

    out: [tokens, heads, head_dim], float32, normalized over those keys
    lse: [tokens, heads], float32, natural log of the sum of exp(score); -inf where there was no key
    """

    out: Tensor
    lse: Tensor


def empty_partial(tokens: int, heads: int, head_dim: int) -> Partial:
    """Attention over no keys: weighs nothing when merged."""
    return Partial(torch.zeros(tokens, heads, head_dim), torch.full((tokens, heads), -torch.inf))


def combined_lse(lses: Tensor) -> Tensor:
    """[n, ...] of the parts to [...] of the whole; -inf where every part is empty."""
    top = lses.amax(0)
    finite = torch.where(top == -torch.inf, 0.0, top)
    return finite + (lses - finite).exp().sum(0).log()


def weighted(part: Partial, lse: Tensor) -> Tensor:
    """`part.out` scaled to its share of the whole, whose lse is given; 0 where the part is empty.

    Whatever an empty part's `out` holds is replaced before any multiplication, since 0 * NaN is NaN.
    """
    share = torch.where(part.lse == -torch.inf, 0.0, (part.lse - lse).exp())
    clean = torch.where((part.lse == -torch.inf).unsqueeze(-1), 0.0, part.out)
    return clean * share.unsqueeze(-1)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both."""
    lse = combined_lse(torch.stack([a.lse, b.lse]))
    return Partial(weighted(a, lse) + weighted(b, lse), lse)
