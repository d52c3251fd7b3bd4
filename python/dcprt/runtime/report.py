"""What the scheduler tells of itself: a line per finished request, a busy line a second, a snapshot on demand."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from dcprt.errors import RequestError
from dcprt.ids import Rank
from dcprt.messages import client_id
from dcprt.metrics import Metrics
from dcprt.planner.capacity import Capacity, page_bytes
from dcprt.planner.deployment import Deployment
from dcprt.scheduler.request import Request
from dcprt.scheduler.scheduler import Counters, Scheduler

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


class Journal:
    """Keeps log and metrics: a line per finished request, at most one busy line a second."""

    def __init__(self, deployment: Deployment, scheduler: Scheduler) -> None:
        self._deployment = deployment
        self._scheduler = scheduler
        self._metrics = Metrics()
        size = page_bytes(deployment.spec, deployment.grid, deployment.layout, deployment.dtype)
        self._metrics.kv_bytes.set(deployment.num_pages * size)
        self._metrics.span_tokens.set(deployment.layout.span_tokens)
        self._counted = Counters()
        self._last_step: float | None = None
        self._busy_since: float | None = None
        self._busy = Counters()

    def produced(self, request: Request, now: float) -> None:
        """A request got tokens."""
        if request.first_token is None:
            request.first_token = now
            self._metrics.first_token.observe(now - request.arrival)
        elif request.last_token is not None:
            self._metrics.inter_token.observe(now - request.last_token)
        request.last_token = now

    def ended(self, request: Request, reason: str, now: float) -> None:
        """A request had its last message."""
        log.info("%s", finished_line(request, reason, now))
        self._metrics.requests.labels(reason).inc()
        self._metrics.end_to_end.observe(now - request.arrival)

    def refused(self, rid: str, error: RequestError) -> None:
        """A request was not accepted."""
        log.info("request %s refused: %s", client_id(rid), error)
        self._metrics.requests.labels("refused").inc()

    def stepped(self, now: float) -> None:
        """The workers have done a step."""
        if self._last_step is not None:
            self._metrics.step.observe(now - self._last_step)
        self._last_step = None if self._scheduler.idle else now
        self._busy_line(now)

    def metrics_text(self) -> str:
        """In Prometheus' text format."""
        metrics, store = self._metrics, self._scheduler.store
        metrics.running.set(len(self._scheduler.running))
        metrics.waiting.set(len(self._scheduler.waiting))
        metrics.pages.labels("free").set(store.allocator.free_pages)
        metrics.pages.labels("cached").set(store.cache.evictable_pages)
        metrics.pages.labels("in_use").set(used_pages(self._scheduler))
        counters = self._scheduler.counters
        for kind in ("prompt", "cached", "prefilled", "generated"):
            name = f"{kind}_tokens"
            metrics.tokens.labels(kind).inc(getattr(counters, name) - getattr(self._counted, name))
        metrics.preemptions.inc(counters.preemptions - self._counted.preemptions)
        metrics.hit_rate.set(counters.cached_tokens / max(counters.prompt_tokens, 1))
        self._counted = dataclasses.replace(counters)
        return metrics.text()

    def _busy_line(self, now: float) -> None:
        counters, since = self._scheduler.counters, self._busy_since
        if since is not None and now - since < 1:
            return
        if since is not None and now - since < 5:
            log.info(
                "running %d, waiting %d, KV %d of %d tokens in use, prompt %.0f tok/s, generated %.1f tok/s",
                len(self._scheduler.running),
                len(self._scheduler.waiting),
                used_pages(self._scheduler) * self._deployment.layout.span_tokens,
                self._deployment.capacity_tokens,
                (counters.prefilled_tokens - self._busy.prefilled_tokens) / (now - since),
                (counters.generated_tokens - self._busy.generated_tokens) / (now - since),
            )
        self._busy_since, self._busy = now, dataclasses.replace(counters)


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
