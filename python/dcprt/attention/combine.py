"""Two ways to combine the partial results of a group, each rank keeping its own heads. Both give the same answer.

Every rank has attention of the same queries, over different keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from dcprt import ops
from dcprt.attention.partial import Partial, combined_lse, scaled, shares
from dcprt.comm.groups import Groups
from dcprt.comm.protocol import Collective

Combine = Callable[[Partial, Collective], Partial]


def ag_rs(local: Partial, group: Collective) -> Partial:
    """All-gather of the lse, then a reduce-scatter over heads of the scaled outputs.

    local: out [tokens, all heads of the group, dim]; returns the own heads over all keys.
    """
    tokens, heads, dim = local.out.shape
    own = heads // group.size
    lses = group.all_gather(local.lse)
    part = scaled(local.out, shares(lses)[group.rank])
    out = group.reduce_scatter(part.view(tokens, group.size, own, dim).transpose(0, 1).contiguous())
    return Partial(out, combined_lse(lses).view(tokens, group.size, own)[:, group.rank].contiguous())


def a2a(local: Partial, group: Collective) -> Partial:
    """One all-to-all of outputs and lse, packed by head slice, merged by the receiver in rank order."""
    if ops.NATIVE and local.out.is_cpu:
        return Partial(*ops.merge_packed(group.all_to_all(_packed(local, group.size))))
    tokens, heads, dim = local.out.shape
    own = heads // group.size
    packed = torch.cat([local.out, local.lse.unsqueeze(-1)], dim=-1)
    slices = packed.view(tokens, group.size, own, dim + 1).transpose(0, 1).contiguous()
    parts = group.all_to_all(slices)
    lses = parts[..., dim]
    out = scaled(parts[..., :dim], shares(lses)).sum(0)
    return Partial(out, combined_lse(lses))


def _packed(local: Partial, ranks: int) -> Tensor:
    return ops.pack_partial(local.out.contiguous(), local.lse.contiguous(), ranks)


COMBINES = MappingProxyType({"ag_rs": ag_rs, "a2a": a2a})
PROBED_TOKENS = (1, 16, 256)
ROUNDS = 20


class Chooser:
    """A `Combine` that takes, for each number of tokens, what was faster when it was measured at start-up."""

    def __init__(self, groups: Groups, heads: int, dim: int) -> None:
        """heads: all of the group. Every rank takes part; rank 0 of the world decides for all."""
        self._choices = _measure(groups, heads, dim)

    def __call__(self, local: Partial, group: Collective) -> Partial:
        return self.way_for(local.out.shape[0])(local, group)

    def way_for(self, tokens: int) -> Combine:
        """What is taken for so many tokens."""
        name = next((name for most, name in self._choices if tokens <= most), self._choices[-1][1])
        return COMBINES[name]

    @property
    def choices(self) -> list[tuple[int, str]]:
        """(up to this many tokens, the way), in rising order."""
        return self._choices


def _measure(groups: Groups, heads: int, dim: int) -> list[tuple[int, str]]:
    names = list(COMBINES)
    chosen = torch.zeros(len(PROBED_TOKENS), dtype=torch.int64)
    for i, tokens in enumerate(PROBED_TOKENS):
        probe = Partial(torch.zeros(tokens, heads, dim), torch.zeros(tokens, heads))
        seconds = []
        for name in names:
            COMBINES[name](probe, groups.dcp)
            groups.world.barrier()
            seconds.append(min(_timed(COMBINES[name], probe, groups.dcp) for _ in range(ROUNDS)))
        chosen[i] = min(range(len(names)), key=seconds.__getitem__)
    groups.world.broadcast(chosen)
    limits = [*PROBED_TOKENS[1:], 1 << 62]
    return [(most, names[int(index)]) for most, index in zip(limits, chosen, strict=True)]


def _timed(combine: Combine, probe: Partial, group: Collective) -> float:
    start = time.perf_counter()
    combine(probe, group)
    return time.perf_counter() - start


def choose(name: str, groups: Groups, heads: int, dim: int) -> Combine:
    """The way called `name`; `auto` measures."""
    return Chooser(groups, heads, dim) if name == "auto" else COMBINES[name]


def way_for(combine: Combine, tokens: int) -> Combine:
    """What `combine` is for so many tokens."""
    return combine.way_for(tokens) if isinstance(combine, Chooser) else combine


def gather_heads(q: Tensor, group: Collective) -> Tensor:
    """[tokens, own heads, dim] to [tokens, all heads of the group, dim], in rank order."""
    return group.all_gather(q.contiguous()).transpose(0, 1).flatten(1, 2)
