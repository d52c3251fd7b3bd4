"""Scheduler and fake workers together, driven as the scheduler's process drives them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dcprt.config import ScheduleConfig
from dcprt.kv.layout import Layout
from dcprt.messages import PlanBody, StepPlan, TokensOut
from dcprt.params import SamplingParams
from dcprt.scheduler.executor import PlanWriter
from dcprt.scheduler.request import Request
from dcprt.scheduler.scheduler import Limits, Scheduler
from dcprt.scheduler.store import KVStore

from .fake_workers import VOCAB, FakeWorkers, reference


@dataclass
class Client:
    """What the sender of a request knows of it."""

    request: Request
    prompt: list[int]
    outputs: list[TokensOut] = field(default_factory=list)
    aborted: bool = False
    first_step: int | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish is not None

    @property
    def cached(self) -> int:
        return self.outputs[-1].usage.cached_tokens


class Bench:
    """A server without sockets; proves the accounting after each step."""

    def __init__(
        self,
        layout: Layout,
        pages: int,
        *,
        chunk: int = 2048,
        max_running: int = 64,
        context: int = 1 << 20,
        reuse: bool = True,
        eos: frozenset[int] = frozenset(),
        ahead: int = 0,
    ) -> None:
        self.store = KVStore(layout, pages + 1, reuse=reuse)
        config = ScheduleConfig(chunked_prefill_size=chunk, max_running_requests=max_running)
        self.eos = eos
        self.scheduler = Scheduler(
            self.store, config, Limits(context, self.store.capacity_tokens, VOCAB, eos_token_ids=eos)
        )
        self.workers = FakeWorkers(layout, pages + 1, max_running)
        self.clients: dict[str, Client] = {}
        self.steps = 0
        self._writer = PlanWriter()
        self._chunk = chunk
        self._ahead = ahead
        self._flights = 0

    def send(self, prompt: Sequence[int], max_tokens: int | None, *, rid: str = "", namespace: str = "") -> Client:
        """Queue a request; raises RequestError where a server would answer 400."""
        rid = rid or f"r{len(self.clients)}"
        request = Request(
            rid=rid,
            tokens=array("i", prompt),
            prompt_len=len(prompt),
            max_tokens=self.scheduler.limits.output_room(len(prompt), max_tokens),
            sampling=SamplingParams(max_tokens=max_tokens),
            seed=0,
            namespace=namespace,
        )
        self.scheduler.add(request)
        self.clients[rid] = client = Client(request, list(prompt))
        return client

    def abort(self, rid: str) -> Request | None:
        ended = self.scheduler.end(rid)
        if ended is not None:
            self.clients[rid].aborted = True
            assert not ended.pages
            assert not ended.owned
            assert ended.node is None
        self.scheduler.check()
        return ended

    def step(self, in_flight: Callable[[], None] | None = None) -> bool:
        """One step; `in_flight` happens while the workers compute. False if there was nothing to compute.

        With `ahead` the next plan is made, and its pages are taken, before the result of the last one is known.
        """
        self.steps += 1
        body = self.scheduler.plan()
        self.scheduler.check()
        if body is not None:
            assert sum(work.num_tokens for work in body.work if work.num_tokens > 1) <= self._chunk
            self.workers.submit(self.write(body))
            self._flights += 1
        if not self._flights:
            return False
        if body is not None and self._flights <= self._ahead:
            return True
        self._flights -= 1
        result = self.workers.result()
        if in_flight:
            in_flight()
        for output in self.scheduler.apply(result.tokens):
            self._deliver(output)
        self.scheduler.check()
        return True

    def write(self, body: PlanBody) -> StepPlan:
        """The next plan of the chain."""
        return self._writer.write(body)

    def run(self, most: int = 20_000) -> None:
        """Until all requests have ended."""
        empty = 0
        while not self.scheduler.idle or self._flights:
            assert most > 0, "no end in sight"
            most -= 1
            empty = 0 if self.step() else empty + 1
            assert empty <= 2, "stuck"
        self.check_idle()

    def ask(self, prompt: Sequence[int], max_tokens: int, **more: str) -> Client:
        """Send, run, and verify."""
        client = self.send(prompt, max_tokens, **more)
        self.run()
        self.verify(client)
        return client

    def verify(self, client: Client) -> None:
        """The model's own output, one final message, and a usage that never changes its mind."""
        expected, reason = reference(client.prompt, client.request.max_tokens, self.eos)
        finals = [output for output in client.outputs if output.finish]
        if client.aborted:
            assert not finals
            assert client.tokens == expected[: len(client.tokens)]
        else:
            assert len(finals) == 1
            assert client.outputs[-1].finish is not None
            assert (client.tokens, client.outputs[-1].finish.reason) == (expected, reason)
        for count, output in enumerate(client.outputs, 1):
            assert output.usage.prompt_tokens == len(client.prompt)
            assert output.usage.completion_tokens == count
            assert output.usage.cached_tokens == client.outputs[0].usage.cached_tokens
            assert output.usage.cached_tokens < len(client.prompt)

    def verify_all(self) -> None:
        for client in self.clients.values():
            self.verify(client)

    def check_idle(self) -> None:
        """Free and cached pages are all there are, and the workers' rows are free again."""
        assert self.scheduler.idle
        self.scheduler.check()
        allocator, cache = self.store.allocator, self.store.cache
        cached = list(cache.pages())
        assert len(set(cached)) == len(cached)
        assert allocator.free_pages + len(cached) == allocator.capacity
        assert cache.evictable_pages == len(cached)

    def _deliver(self, output: TokensOut) -> None:
        client = self.clients[output.rid]
        assert not client.aborted
        assert not client.finished
        assert output.token_ids
        client.first_step = client.first_step or self.steps
        client.outputs.append(output)
