"""What a server measures, under names that stay: they are documented in docs/metrics.md, and a test compares."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics import MetricWrapperBase

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class Described:
    """A metric as the docs name it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    """Prometheus metrics of one scheduler, in a registry of their own; without the library's `_created` series."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        self.running = Gauge("dcprt_requests_running", "Requests being computed", registry=registry)
        self.waiting = Gauge("dcprt_requests_waiting", "Requests in the queue", registry=registry)
        self.requests = Counter("dcprt_requests", "Requests that ended, by reason", ["reason"], registry=registry)
        self.tokens = Counter(
            "dcprt_tokens",
            "Tokens by kind: prompt (of admitted requests), cached (of those), prefilled, generated",
            ["kind"],
            registry=registry,
        )
        self.hit_rate = Gauge(
            "dcprt_prefix_cache_hit_rate", "Cached tokens per prompt token since the start", registry=registry
        )
        self.pages = Gauge("dcprt_kv_pages", "Pages by state: free, cached, in_use", ["state"], registry=registry)
        self.kv_bytes = Gauge("dcprt_kv_bytes_per_rank", "Bytes of the KV pool of one rank", registry=registry)
        self.span_tokens = Gauge("dcprt_kv_span_tokens", "Positions that one page covers", registry=registry)
        self.preemptions = Counter("dcprt_preemptions", "Requests preempted for want of pages", registry=registry)
        self.first_token = Histogram(
            "dcprt_time_to_first_token_seconds",
            "From arrival at the scheduler to the first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "dcprt_inter_token_seconds",
            "Between two outputs of a request",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "dcprt_request_seconds", "From arrival to the last token", buckets=REQUEST_BUCKETS, registry=registry
        )
        self.step = Histogram(
            "dcprt_step_seconds", "Between two results of the workers", buckets=TOKEN_BUCKETS, registry=registry
        )

    def describe(self) -> list[Described]:
        """All metrics, for the docs."""
        found = []
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                family = next(iter(metric.describe()))
                name = family.name + ("_total" if family.type == "counter" else "")
                found.append(Described(name, family.type, tuple(metric._labelnames), family.documentation))
        return found

    def text(self) -> str:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry).decode()
