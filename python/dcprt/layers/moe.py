"""Routed experts: every token passes the few experts that a router chooses for it.

All ranks route all tokens alike. Experts are cut over ranks either by width, each rank holding its part of every
expert, or by expert, each rank holding some experts whole; what the ranks compute is summed once, together with their
parts of the shared experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dcprt.comm.protocol import Collective
from dcprt.layers.mlp import Expert
from dcprt.layers.norm import Normed
from dcprt.spec import MoESpec


class Router:
    """Scores in float32, and the choice of `experts_per_token` experts by them.

    Softmax or sigmoid scoring; the choice is limited to the best groups of experts as in DeepSeek-V2 (a group counts as
    much as its best expert) or DeepSeek-V3 (as its best two, after adding the learned bias).

    weight: float32 [experts, hidden]; bias: float32 [experts], added for the choice but not for the weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, moe: MoESpec) -> None:
        self._weight = weight
        self._bias = bias
        self._moe = moe

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] to weights, float32 [tokens, chosen], and experts, int64 [tokens, chosen]."""
        moe = self._moe
        logits = F.linear(x.float(), self._weight)
        scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
        preferred = scores if self._bias is None else scores + self._bias
        if moe.groups > 1:
            preferred = self._in_best_groups(preferred)
        chosen = preferred.topk(moe.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * moe.scale, chosen

    def _in_best_groups(self, preferred: Tensor) -> Tensor:
        """-inf for experts outside the best groups."""
        moe = self._moe
        grouped = torch.unflatten(preferred, -1, (moe.groups, -1))
        score = grouped.amax(-1) if moe.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        best = score.topk(moe.top_groups, dim=-1).indices
        outside = torch.ones_like(score, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


class Experts:
    """A rank's experts `first`, `first + 1`, ..., or its part of their width. There may be none."""

    def __init__(self, experts: Sequence[Expert], first: int = 0) -> None:
        self._experts = experts
        self._first = first

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """This rank's part of the weighted sum over the chosen experts, float32 [tokens, hidden].

        x: [tokens, hidden]; weights, chosen: [tokens, n]. Each held expert with tokens is one gated MLP over them;
        experts are added in the order of their numbers, so the sum does not depend on how tokens were batched.
        """
        out = torch.zeros_like(x, dtype=torch.float32)
        held = len(self._experts)
        if not held:
            return out
        flat = chosen.flatten() - self._first
        order = flat.argsort(stable=True)
        here = flat[(flat >= 0) & (flat < held)]
        begin = int((flat < 0).sum())
        weights = weights.flatten()
        for expert, count in enumerate(torch.bincount(here, minlength=held).tolist()):
            if not count:
                continue
            places = order[begin : begin + count]
            begin += count
            tokens = places // chosen.shape[-1]
            part = self._experts[expert](x[tokens])
            out.index_add_(0, tokens, part * weights[places].unsqueeze(-1))
        return out


class MoE:
    """Router, experts, and the shared experts as one gated MLP whose result is this rank's part."""

    def __init__(self, router: Router, experts: Experts, shared: Expert | None, world: Collective) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared
        self._world = world

    def __call__(self, normed: Normed) -> Tensor:
        """To float32 [tokens, hidden], summed over the ranks."""
        x = normed.value()
        out = self._experts(x, *self._router(x))
        if self._shared is not None:
            out += self._shared(x)
        return self._world.all_reduce(out)
