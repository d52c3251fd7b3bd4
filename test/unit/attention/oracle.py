"""Attention by its definition, one query at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], visible: Sequence[int], scale: float) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [keys, kv_heads, dim]; token t sees the first `visible[t]` keys.

    Returns float64 [tokens, heads, value dim]; 0 where nothing is visible.
    """
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for t, seen in enumerate(visible):
        for h, kv in enumerate(q_to_kv):
            if seen:
                scores = k[:seen, kv].double() @ q[t, h].double() * scale
                out[t, h] = scores.softmax(0) @ v[:seen, kv].double()
    return out


def lse(q: Tensor, k: Tensor, q_to_kv: Sequence[int], visible: Sequence[int], scale: float) -> Tensor:
    """Natural log of the sum of exp(score): float64 [tokens, heads], -inf where nothing is visible."""
    out = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for t, seen in enumerate(visible):
        for h, kv in enumerate(q_to_kv):
            if seen:
                out[t, h] = (k[:seen, kv].double() @ q[t, h].double() * scale).logsumexp(0)
    return out
