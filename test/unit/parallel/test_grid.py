"""The grid: examples of the design, and what must hold for any heads on any grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from dcprt.errors import GridError
from dcprt.ids import Rank
from dcprt.parallel.grid import PADDING, Grid, HeadShard, RankHeads, split_evenly

SMOLLM2 = (9, 3)


def ranks_of(grid: Grid, heads: tuple[int, int]) -> list[RankHeads]:
    return [grid.heads(Rank(rank), *heads) for rank in range(grid.tp)]


def grids(most: int) -> Iterator[Grid]:
    for tp in range(1, most + 1):
        for dcp in range(1, tp + 1):
            if tp % dcp == 0:
                yield Grid(tp, dcp)


def cases() -> Iterator[tuple[Grid, int, int]]:
    for grid in grids(12):
        for num_kv_heads in range(1, 9):
            for group in range(1, 7):
                yield grid, num_kv_heads * group, num_kv_heads


def real(heads: tuple[int, ...]) -> list[int]:
    return [head for head in heads if head != PADDING]


def queries_by_kv(shard: HeadShard) -> list[list[int]]:
    """The real query heads of each KV head of a shard."""
    width = shard.places_per_kv
    return [real(shard.places[i * width : (i + 1) * width]) for i in range(len(shard.kv_heads))]


def test_smollm2_on_one_head_shard_of_four_ranks() -> None:
    grid = Grid(4, 4)
    (shard,) = grid.shards(*SMOLLM2)
    assert shard.kv_heads == (0, 1, 2)
    assert shard.places == (0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1)
    ranks = ranks_of(grid, SMOLLM2)
    assert [rank.q_heads for rank in ranks] == [(0, 1, 2), (-1, 3, 4), (5, -1, 6), (7, 8, -1)]
    assert [rank.q_to_kv for rank in ranks] == [(0, 0, 0), (0, 1, 1), (1, 1, 2), (2, 2, 2)]


def test_smollm2_on_two_head_shards_of_two_ranks() -> None:
    grid = Grid(4, 2)
    first, second = grid.shards(*SMOLLM2)
    assert (first.kv_heads, first.places) == ((0, 1), (0, 1, 2, 3, 4, 5))
    assert (second.kv_heads, second.places) == ((2, -1), (6, 7, 8, -1, -1, -1))
    assert [len(rank.q_heads) for rank in ranks_of(grid, SMOLLM2)] == [3, 3, 3, 3]


def test_smollm2_runs_on_any_grid_up_to_eight_ranks() -> None:
    for grid in grids(8):
        found = [head for rank in ranks_of(grid, SMOLLM2) for head in real(rank.q_heads)]
        assert sorted(found) == list(range(9)), grid


def test_more_shards_than_kv_heads_replicate_evenly() -> None:
    shards = Grid(8, 1).shards(*SMOLLM2)
    assert Counter(shard.kv_heads for shard in shards) == {(0,): 3, (1,): 3, (2,): 2}
    assert [shard.places for shard in shards] == [(0,), (1,), (2,), (3,), (4,), (5,), (6, 7), (8,)]


def test_every_query_head_sits_once_and_with_its_own_kv_head() -> None:
    for grid, num_heads, num_kv_heads in cases():
        group = num_heads // num_kv_heads
        found = []
        for rank in ranks_of(grid, (num_heads, num_kv_heads)):
            assert len(rank.q_to_kv) == len(rank.q_heads)
            for query, index in zip(rank.q_heads, rank.q_to_kv, strict=True):
                assert 0 <= index < len(rank.kv_heads)
                if query != PADDING:
                    assert rank.kv_heads[index] == query // group, (grid, num_heads, num_kv_heads)
            found += real(rank.q_heads)
        assert sorted(found) == list(range(num_heads)), (grid, num_heads, num_kv_heads)


def test_ranks_of_a_dcp_group_share_kv_heads_and_divide_the_places() -> None:
    for grid, num_heads, num_kv_heads in cases():
        ranks = ranks_of(grid, (num_heads, num_kv_heads))
        shards = grid.shards(num_heads, num_kv_heads)
        for group, shard in zip(grid.dcp_groups(), shards, strict=True):
            members = [ranks[rank] for rank in group]
            assert {member.kv_heads for member in members} == {shard.kv_heads}
            assert {member.shard_q_heads for member in members} == {shard.places}
            assert len({len(member.q_heads) for member in members}) == 1
            assert sum((member.q_heads for member in members), ()) == shard.places


def test_places_are_uniform_and_the_fewest() -> None:
    for grid, num_heads, num_kv_heads in cases():
        for shard in grid.shards(num_heads, num_kv_heads):
            k = len(shard.kv_heads)
            assert len(shard.places) == k * shard.places_per_kv
            most = max(map(len, queries_by_kv(shard)))
            fewest = next(p for p in range(max(most, 1), most + grid.dcp + 1) if k * p % grid.dcp == 0)
            assert shard.places_per_kv == fewest, (grid, num_heads, num_kv_heads, shard)


def test_kv_heads_are_distinct_where_they_suffice_and_else_replicated_evenly() -> None:
    for grid, num_heads, num_kv_heads in cases():
        shards = grid.shards(num_heads, num_kv_heads)
        k = -(-num_kv_heads // grid.head_shards)
        assert len(shards) == grid.head_shards
        assert {len(shard.kv_heads) for shard in shards} == {k}
        held = Counter(head for shard in shards for head in real(shard.kv_heads))
        assert held.keys() == set(range(num_kv_heads))
        if grid.head_shards <= num_kv_heads:
            assert set(held.values()) == {1}
        else:
            assert max(held.values()) - min(held.values()) <= 1
            assert sum(held.values()) == grid.head_shards


def test_one_kv_head_is_on_every_rank_of_every_grid() -> None:
    for grid in grids(8):
        assert {rank.kv_heads for rank in ranks_of(grid, (4, 1))} == {(0,)}


def test_dcp_groups_are_contiguous() -> None:
    grid = Grid(6, 3)
    assert grid.dcp_groups() == [[0, 1, 2], [3, 4, 5]]
    assert [grid.head_shard(Rank(r)) for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [grid.dcp_rank(Rank(r)) for r in range(6)] == [0, 1, 2, 0, 1, 2]


def test_widths_cover_everything_once() -> None:
    for tp in range(1, 13):
        for total in [1, 2, 5, 7, 64, 1536, 49152, 50257]:
            shards = [Grid(tp, 1).width(Rank(rank), total) for rank in range(tp)]
            covered = [i for shard in shards for i in range(shard.start, shard.stop)]
            assert covered == list(range(total)), (tp, total)
            assert {shard.padded for shard in shards} == {-(-total // tp)}
            assert all(0 <= shard.stop - shard.start <= shard.padded for shard in shards)


def test_split_evenly() -> None:
    for total in range(20):
        for parts in range(1, 9):
            ranges = split_evenly(total, parts)
            assert [i for part in ranges for i in part] == list(range(total))
            sizes = [len(part) for part in ranges]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("tp", "dcp", "fits"), [(4, 3, "[1, 2, 4]"), (6, 4, "[1, 2, 3, 6]"), (2, 4, "[1, 2]")])
def test_a_dcp_that_does_not_divide_is_refused_with_those_that_do(tp: int, dcp: int, fits: str) -> None:
    with pytest.raises(GridError) as caught:
        Grid(tp, dcp)
    assert f"dcp {dcp} does not divide tp {tp}" in str(caught.value)
    assert fits in str(caught.value)


def test_heads_that_no_grid_can_share_are_refused() -> None:
    with pytest.raises(GridError, match="7 query heads cannot share 3 KV heads"):
        Grid(1, 1).shards(7, 3)
