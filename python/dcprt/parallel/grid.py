"""Who holds what: attention heads over head shards, query heads over the ranks of a shard, widths over all ranks.

`tp` ranks hold one copy of the model; `dcp` of them, contiguous, form a head shard and share its KV along the
sequence. Nothing else in dcprt derives which head lives where.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dcprt.errors import GridError
from dcprt.ids import Rank

PADDING = -1
"""Stands for a head that does not exist: zero weights, contributes nothing."""


def split_evenly(total: int, parts: int) -> list[range]:
    """`total` things into `parts` contiguous ranges whose sizes differ by at most one, larger ones first."""
    base, larger = divmod(total, parts)
    bounds = [i * base + min(i, larger) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class WidthShard:
    """A rank's part `[start, stop)` of a width, zero-padded to `padded`, which is the same on every rank."""

    start: int
    stop: int
    padded: int


@dataclass(frozen=True)
class HeadShard:
    """The heads of one head shard, and places for its query heads.

    `kv_heads` has `k` entries; `places` has `k * places_per_kv` query heads, those of the first KV head first.
    -1 is padding. Every KV head has equally many places, so the gathered context pass is uniform GQA.
    """

    kv_heads: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def places_per_kv(self) -> int:
        return len(self.places) // len(self.kv_heads)


@dataclass(frozen=True)
class RankHeads:
    """What one rank computes: its own query heads, and the KV heads of its head shard.

    `q_to_kv[i]` is the index into `kv_heads` of the KV head that own query head `i` attends to.
    """

    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    q_to_kv: tuple[int, ...]
    shard_q_heads: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """`tp` ranks, `dcp` of them per head shard; DCP groups are contiguous ranks."""

    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dcp < 1 or self.tp % self.dcp:
            fits = [d for d in range(1, self.tp + 1) if self.tp % d == 0]
            raise GridError(f"dcp {self.dcp} does not divide tp {self.tp}; it can be {fits}.")

    @property
    def head_shards(self) -> int:
        return self.tp // self.dcp

    def head_shard(self, rank: Rank) -> int:
        """Which head shard `rank` belongs to."""
        return rank // self.dcp

    def dcp_rank(self, rank: Rank) -> int:
        """`rank`'s place in its DCP group: the owner index of the layout."""
        return rank % self.dcp

    def dcp_groups(self) -> list[list[Rank]]:
        """The ranks of every DCP group."""
        return [[Rank(h * self.dcp + r) for r in range(self.dcp)] for h in range(self.head_shards)]

    def shards(self, num_heads: int, num_kv_heads: int) -> list[HeadShard]:
        """The heads of every head shard; fewest KV bytes a rank first, then fewest query heads."""
        if num_heads % num_kv_heads:
            raise GridError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
        if self.head_shards <= num_kv_heads:
            return self._distinct(num_heads // num_kv_heads, num_kv_heads)
        return self._replicated(num_heads // num_kv_heads, num_kv_heads)

    def heads(self, rank: Rank, num_heads: int, num_kv_heads: int) -> RankHeads:
        """The heads of one rank."""
        shard = self.shards(num_heads, num_kv_heads)[self.head_shard(rank)]
        own = split_evenly(len(shard.places), self.dcp)[self.dcp_rank(rank)]
        return RankHeads(
            q_heads=tuple(shard.places[i] for i in own),
            kv_heads=shard.kv_heads,
            q_to_kv=tuple(i // shard.places_per_kv for i in own),
            shard_q_heads=shard.places,
        )

    def width(self, rank: Rank, total: int) -> WidthShard:
        """`rank`'s part of an MLP width or a vocabulary of `total`."""
        padded = -(-total // self.tp)
        start = min(rank * padded, total)
        return WidthShard(start, min(start + padded, total), padded)

    def _distinct(self, group: int, num_kv_heads: int) -> list[HeadShard]:
        """Each KV head in exactly one shard, with all `group` query heads that share it."""
        k = -(-num_kv_heads // self.head_shards)
        places = self._least_places(k, group)
        shards = []
        for held in split_evenly(num_kv_heads, self.head_shards):
            kv_heads = [*held, *[PADDING] * (k - len(held))]
            queries: list[int] = []
            for kv in kv_heads:
                real = [] if kv == PADDING else list(range(kv * group, (kv + 1) * group))
                queries += real + [PADDING] * (places - len(real))
            shards.append(HeadShard(tuple(kv_heads), tuple(queries)))
        return shards

    def _replicated(self, group: int, num_kv_heads: int) -> list[HeadShard]:
        """One KV head a shard, held by several shards, which divide its query heads among themselves."""
        shards = []
        for kv, copies in enumerate(split_evenly(self.head_shards, num_kv_heads)):
            for part in split_evenly(group, len(copies)):
                real = [kv * group + i for i in part]
                places = self._least_places(1, max(len(real), 1))
                shards.append(HeadShard((kv,), tuple(real + [PADDING] * (places - len(real)))))
        return shards

    def _least_places(self, k: int, real: int) -> int:
        """Least places per KV head that hold `real` query heads and divide, times `k`, by `dcp`."""
        places = real
        while k * places % self.dcp:
            places += 1
        return places
