"""Attention results that can still be merged, and how they are.

Source of the formula: softmax over a union of key sets from the softmaxes over each, as in "Online normalizer
calculation for softmax" (Milakov and Gimelshein, 2018) and Flash-Decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dcprt import ops


class Partial(NamedTuple):
    """Attention over some of the keys.

    out: [tokens, heads, head_dim], float32, normalized over those keys
    lse: [tokens, heads], float32, natural log of the sum of exp(score); -inf where there was no key
    """

    out: Tensor
    lse: Tensor


def empty_partial(tokens: int, heads: int, dim: int) -> Partial:
    """Attention over no keys, with values of `dim` elements: weighs nothing when merged."""
    return Partial(torch.zeros(tokens, heads, dim), torch.full((tokens, heads), -torch.inf))


def combined_lse(lses: Tensor) -> Tensor:
    """[n, ...] of the parts to [...] of the whole; -inf where every part is empty."""
    top = _finite_top(lses)
    return top + (lses - top).exp().sum(0).log()


def shares(lses: Tensor) -> Tensor:
    """[n, ...]: what each part weighs in the whole. They sum to 1, or are all 0 where every part is empty.

    Weights relative to the largest part, then divided by their sum: a difference to the combined lse would carry that
    lse's rounding, which grows with its size.
    """
    weights = (lses - _finite_top(lses)).exp()
    total = weights.sum(0)
    return weights / torch.where(total == 0, 1.0, total)


def scaled(out: Tensor, share: Tensor) -> Tensor:
    """`out` [..., head_dim] times `share` [...].

    What a part without weight holds is replaced before the multiplication, since 0 * NaN is NaN.
    """
    weight = share.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, out) * weight


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both."""
    if ops.NATIVE and a.out.is_cpu:
        return Partial(*ops.merge(a.out.contiguous(), a.lse.contiguous(), b.out.contiguous(), b.lse.contiguous()))
    lses = torch.stack([a.lse, b.lse])
    share = shares(lses)
    return Partial(scaled(a.out, share[0]) + scaled(b.out, share[1]), combined_lse(lses))


def _finite_top(lses: Tensor) -> Tensor:
    top = lses.amax(0)
    return torch.where(top == -torch.inf, 0.0, top)
