"""What the scheduler tells of itself: a line per finished request, a busy line a second, a snapshot on demand."""

from __future__ import annotations

import logging
from typing import Any

from dcprt.ids import Rank
from dcprt.messages import client_id
from dcprt.planner.capacity import Capacity, page_bytes
from dcprt.planner.deployment import Deployment
from dcprt.scheduler.request import Request
from dcprt.scheduler.scheduler import Scheduler

log = logging.getLogger("dcprt")


def finished_line(request: Request, reason: str, now: float) -> str:
    """One line: prompt, cached, generated, time to first token, tokens a second."""
    line = (
        f"request {client_id(request.rid)} {reason}: prompt {request.prompt_len}, cached {request.cached_len or 0}, "
        f"generated {request.output_len}"
    )
    if request.first_token is not None:
        line += f", first token {1000 * (request.first_token - request.arrival):.0f} ms"
        if request.output_len > 1 and now > request.first_token:
            line += f", {(request.output_len - 1) / (now - request.first_token):.1f} tok/s"
    return line


def used_pages(scheduler: Scheduler) -> int:
    """Pages that running requests hold or share; the rest is free or could be."""
    return scheduler.store.allocator.capacity - scheduler.store.available_pages


class BusyLine:
    """At most one log line a second, while there is work."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._since = 0.0
        self._prompt = self._generated = 0

    def tick(self, scheduler: Scheduler, now: float) -> None:
        elapsed = now - self._since
        if elapsed < 1:
            return
        counters = scheduler.counters
        prompt, generated = counters.prefilled_tokens, counters.generated_tokens
        if self._since and elapsed < 5:
            used = used_pages(scheduler) * self._deployment.layout.span_tokens
            log.info(
                "running %d, waiting %d, KV %d of %d tokens in use, prompt %.0f tok/s, generated %.1f tok/s",
                len(scheduler.running),
                len(scheduler.waiting),
                used,
                self._deployment.capacity_tokens,
                (prompt - self._prompt) / elapsed,
                (generated - self._generated) / elapsed,
            )
        self._since, self._prompt, self._generated = now, prompt, generated


def snapshot(scheduler: Scheduler, deployment: Deployment) -> dict[str, Any]:
    """The state for `/server_info`: grid, capacity, and where each running request's tokens live."""
    grid, layout, store = deployment.grid, deployment.layout, scheduler.store
    size = page_bytes(deployment.spec, grid, layout, deployment.dtype)
    capacity = Capacity(deployment.num_pages, layout, size)
    spread = {r.rid: [layout.local_len(i, r.computed_len) for i in range(grid.dcp)] for r in scheduler.running}
    local = [sum(parts[i] for parts in spread.values()) for i in range(grid.dcp)]
    requests = [
        {
            "rid": client_id(r.rid),
            "prompt_tokens": r.prompt_len,
            "computed_tokens": r.computed_len,
            "tokens_per_dcp_rank": spread[r.rid],
        }
        for r in scheduler.running
    ]
    ranks = [
        {
            "rank": rank,
            "head_shard": grid.head_shard(rank),
            "dcp_rank": grid.dcp_rank(rank),
            "tokens": local[grid.dcp_rank(rank)],
        }
        for rank in map(Rank, range(grid.tp))
    ]
    return {
        "tp": grid.tp,
        "dcp": grid.dcp,
        "dcp_interleave": layout.interleave,
        "page_size": layout.page_size,
        "span_tokens": layout.span_tokens,
        "kv_capacity_tokens": capacity.tokens,
        "kv_bytes_per_token_and_rank": capacity.bytes_per_token,
        "kv_bytes_per_rank": capacity.bytes_per_rank,
        "pages": {
            "total": store.allocator.capacity,
            "free": store.allocator.free_pages,
            "evictable": store.cache.evictable_pages,
            "in_use": used_pages(scheduler),
        },
        "ranks": ranks,
        "running": requests,
        "waiting": len(scheduler.waiting),
        "totals": {
            name: getattr(scheduler.counters, name)
            for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps")
        },
    }
