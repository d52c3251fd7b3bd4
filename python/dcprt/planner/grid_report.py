"""What a grid costs and brings, in words and bytes: the start-up text."""

from __future__ import annotations

from dcprt.ids import Rank
from dcprt.kv.layout import Layout
from dcprt.parallel.grid import PADDING, Grid
from dcprt.planner.capacity import ITEMSIZE, page_bytes
from dcprt.spec import ModelSpec


def describe_grid(
    spec: ModelSpec, grid: Grid, layout: Layout, dtype: str, *, replicate_q: bool = False, ep: bool = False
) -> list[str]:
    """The grid, its padding and copies, and whether dcp brings memory. Bytes are of weights or KV in `dtype`."""
    held = grid.heads(Rank(0), spec.num_heads, spec.cached_heads)
    size = page_bytes(spec, grid, layout, dtype) / layout.span_tokens
    lines = [
        f"grid: tp {grid.tp}, dcp {grid.dcp}, {grid.head_shards} head shard(s) of {len(held.kv_heads)} KV head(s); "
        f"a span is {layout.span_tokens} tokens; KV takes {size:,.0f} bytes a token and rank"
    ]
    lines += _kv_heads(spec, grid, ITEMSIZE[dtype])
    lines += _padded_weights(spec, grid, ITEMSIZE[dtype], ep)
    if replicate_q and grid.dcp > 1:
        more = len(held.shard_q_heads) - len(held.q_heads)
        extra = more * spec.query_head_elements * spec.num_layers * ITEMSIZE[dtype]
        lines.append(f"replicated queries: {more} more heads are projected on each rank, {extra:,} bytes a rank")
    if grid.dcp > 1:
        flat = page_bytes(spec, Grid(grid.tp, 1), Layout(layout.page_size), dtype) / layout.page_size
        if size >= flat:
            lines.append(f"dcp {grid.dcp} brings no memory here: with dcp 1, KV takes {flat:,.0f} bytes a token too")
        else:
            gain = f"{flat / size:.2f}x the tokens of dcp 1 ({flat:,.0f} bytes a token and rank)"
            lines.append(f"dcp {grid.dcp} fits {gain}")
    return lines


def _kv_heads(spec: ModelSpec, grid: Grid, itemsize: int) -> list[str]:
    """Places for KV heads that are zero, or hold a head once more."""
    head = spec.kv_elements_per_head * spec.num_layers * itemsize
    shards = grid.shards(spec.num_heads, spec.cached_heads)
    places = sum(len(shard.kv_heads) for shard in shards)
    padded = sum(shard.kv_heads.count(PADDING) for shard in shards)
    copies = places - padded - spec.cached_heads
    lines = []
    if padded:
        lines.append(
            f"padding: {padded} of {places} KV head places are zero, "
            f"{padded * head:,} bytes a token over the head shards"
        )
    if copies:
        lines.append(
            f"replication: {places - padded} places hold {spec.cached_heads} KV head(s), "
            f"{copies * head:,} bytes a token of copies over the head shards"
        )
    return lines


def _padded_weights(spec: ModelSpec, grid: Grid, itemsize: int, ep: bool) -> list[str]:
    """Zero weights over all ranks: query head places, widths of MLP and experts, vocabulary rows."""

    def surplus(width: int) -> int:
        return grid.width(Rank(0), width).padded * grid.tp - width

    ranks = [grid.heads(Rank(r), spec.num_heads, spec.cached_heads) for r in range(grid.tp)]
    moe = spec.moe
    routed = sum(moe.routed(layer) for layer in range(spec.num_layers)) if moe else 0
    column = 3 * spec.hidden_size
    found = [
        (
            sum(rank.q_heads.count(PADDING) for rank in ranks),
            "query head places",
            (spec.query_head_elements + spec.out_head_elements) * spec.num_layers,
        ),
        (surplus(spec.intermediate_size), "columns of the MLP", column * (spec.num_layers - routed)),
        (surplus(spec.vocab_size), "rows of the vocabulary", (1 if spec.tie_embeddings else 2) * spec.hidden_size),
    ]
    if moe and not ep:
        found.append((surplus(moe.expert_width), "columns of each expert", column * moe.num_experts * routed))
    if moe and moe.shared_width:
        found.append((surplus(moe.shared_width), "columns of the shared experts", column * routed))
    return [
        f"padding: {count} {what} are zero, {count * size * itemsize:,} bytes of weights over all ranks"
        for count, what, size in found
        if count and size
    ]
