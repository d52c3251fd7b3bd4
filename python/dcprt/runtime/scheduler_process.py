"""The scheduler's process: requests from the tokenizer, plans to the workers, tokens back. Alone looks at a clock."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from dcprt.errors import RequestError
from dcprt.messages import (
    Abort,
    Accepted,
    Finish,
    FromWorker,
    Query,
    Reply,
    RequestFailed,
    StepPlan,
    StepResult,
    StopHit,
    TokenRequest,
    TokensOut,
    ToScheduler,
    WorkerReady,
    unpack_tokens,
)
from dcprt.params import SamplingParams
from dcprt.planner.deployment import Deployment
from dcprt.runtime.channel import Launch
from dcprt.runtime.report import Journal, snapshot
from dcprt.scheduler.core import Core
from dcprt.scheduler.request import Request
from dcprt.scheduler.scheduler import Limits, Scheduler
from dcprt.scheduler.store import KVStore
from dcprt.trace import Recorder
from dcprt.wire import Receiver, Sender, endpoint

log = logging.getLogger("dcprt")


class RemoteExecutor:
    """Workers as processes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str, ranks: int) -> None:
        self._plans = [Sender(context, endpoint(run_dir, f"plans-{rank}")) for rank in range(ranks)]
        self._inbox: Receiver[FromWorker] = Receiver(context, endpoint(run_dir, "results"), FromWorker)
        self._results: list[StepResult] = []
        self._waiting_for = set(range(ranks))

    def wait_ready(self) -> None:
        """Until every rank has loaded its weights."""
        while self._waiting_for:
            for message in self._inbox.poll(wait=True):
                assert isinstance(message, WorkerReady), message
                self._waiting_for.discard(message.rank)

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        for sender in self._plans:
            sender.send([plan])

    def result(self) -> StepResult:
        """See `Executor.result`. A worker that dies ends the whole server, so there is no deadline here."""
        while not self._results:
            self._results = [m for m in self._inbox.poll(wait=True) if isinstance(m, StepResult)]
        return self._results.pop(0)


class SchedulerProcess:
    """Feeds a `Core` from sockets."""

    def __init__(self, deployment: Deployment, core: Core, out: Sender) -> None:
        self._deployment = deployment
        self._core = core
        self._scheduler = core.scheduler
        self._out = out
        self._journal = Journal(deployment, core.scheduler)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        return self._core.idle

    def handle(self, message: ToScheduler) -> None:
        """One message from the tokenizer."""
        if isinstance(message, TokenRequest):
            self._add(message)
        elif isinstance(message, Abort):
            self._abort(message.rid)
        elif isinstance(message, StopHit):
            self._end(message.rid, "stop")
        elif isinstance(message, Query):
            self._out.send([Reply(qid=message.qid, body=self._answer(message.kind))])

    def step(self) -> None:
        """Compute one step and send its tokens."""
        outputs = self._core.step()
        now = time.monotonic()
        for output in outputs:
            request = self._requests[output.rid]
            if isinstance(output, RequestFailed):
                self._journal.ended(self._requests.pop(output.rid), "failed", now)
                continue
            self._journal.produced(request, now)
            if output.finish:
                self._journal.ended(self._requests.pop(output.rid), output.finish.reason, now)
        self._out.send(outputs)
        self._journal.stepped(now)

    def end_overdue(self) -> None:
        """Fail the requests whose time is up."""
        now = time.monotonic()
        for request in list(self._requests.values()):
            if request.deadline is not None and request.deadline < now:
                self._end(request.rid, "timeout")
                message = f"The request took longer than its {request.deadline - request.arrival:g} s."
                self._out.send([RequestFailed(rid=request.rid, message=message, status=408, code="timeout")])

    def _add(self, message: TokenRequest) -> None:
        try:
            self._check_queue()
            request = self._request(message)
            self._scheduler.add(request)
        except RequestError as error:
            self._journal.refused(message.rid, error)
            self._out.send([RequestFailed.of(message.rid, error)])
            return
        self._requests[request.rid] = request
        self._out.send([Accepted(rid=request.rid, prompt_len=request.prompt_len)])

    def _check_queue(self) -> None:
        limit, waiting = self._deployment.config.schedule.max_queued_requests, len(self._scheduler.waiting)
        free = self._scheduler.free_rows
        if limit is not None and waiting - free >= limit:
            raise RequestError(f"{waiting} requests wait already; at most {limit} may.", status=503, code="queue_full")

    def _request(self, message: TokenRequest) -> Request:
        """Validate; raises RequestError."""
        tokens, limits = unpack_tokens(message.token_ids), self._scheduler.limits
        if not tokens:
            raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
        if not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
            wrong = next(t for t in tokens if not 0 <= t < limits.vocab_size)
            raise RequestError(f"Token id {wrong} is not in the vocabulary of {limits.vocab_size}.", param="prompt")
        self._check_vocabulary(message.sampling)
        self._arrivals += 1
        now, timeout = time.monotonic(), message.timeout_s
        if timeout is None:
            timeout = self._deployment.config.schedule.request_timeout
        return Request(
            rid=message.rid,
            tokens=tokens,
            prompt_len=len(tokens),
            max_tokens=limits.output_room(len(tokens), message.sampling.max_tokens),
            sampling=message.sampling,
            seed=self._seed(message),
            namespace=message.namespace,
            arrival=now,
            deadline=None if timeout is None else now + timeout,
        )

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        """Raises RequestError for a parameter that names a token which the model does not have."""
        size = self._scheduler.limits.vocab_size
        for param in ("logit_bias", "stop_token_ids"):
            for token in getattr(sampling, param):
                if token >= size:
                    raise RequestError(f"Token id {token} in {param} is not in the vocabulary of {size}.", param=param)

    def _seed(self, message: TokenRequest) -> int:
        """The request's own seed, or the next of the series that `--random-seed` begins."""
        if message.sampling.seed is not None:
            return message.sampling.seed % 2**64
        text = f"{self._deployment.config.schedule.random_seed}/{self._arrivals}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _abort(self, rid: str) -> None:
        request = self._end(rid, "abort")
        if request is not None:
            finish = Finish(reason="abort")
            self._out.send([TokensOut(rid=rid, token_ids=[], usage=request.usage, finish=finish)])

    def _end(self, rid: str, reason: str) -> Request | None:
        """End a live request and free all it has; None if there is none."""
        request = self._scheduler.end(rid)
        if request is not None:
            self._journal.ended(self._requests.pop(rid), reason, time.monotonic())
        return request

    def _answer(self, kind: str) -> dict[str, Any]:
        if kind == "metrics":
            return {"text": self._journal.metrics_text()}
        if kind == "flush_cache":
            pages = self._scheduler.store.cache.flush()
            return {"flushed_tokens": pages * self._deployment.layout.span_tokens}
        assert kind == "info", kind
        return snapshot(self._scheduler, self._deployment)


def run(launch: Launch, ready: Callable[[], None]) -> None:
    """Serve until the process is ended."""
    deployment = launch.deployment
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, endpoint(launch.run_dir, "scheduler"), ToScheduler)
    out = Sender(context, endpoint(launch.run_dir, "tokens"))
    executor = RemoteExecutor(context, launch.run_dir, deployment.grid.tp)
    limits = Limits(
        context_len=deployment.context_len,
        capacity_tokens=deployment.capacity_tokens,
        vocab_size=deployment.spec.vocab_size,
        eos_token_ids=frozenset(deployment.spec.eos_token_ids),
    )
    store = KVStore(deployment.layout, deployment.num_pages, reuse=not deployment.config.kv.disable_radix_cache)
    schedule = deployment.config.schedule
    scheduler = Scheduler(store, schedule, limits)
    recorder = None
    if deployment.config.server.profile_steps is not None:
        recorder = Recorder(launch.run_dir, deployment.grid.tp, "scheduler")
        scheduler = recorder.traced(scheduler, {"plan": "plan", "apply": "apply result"})
        executor = recorder.traced(executor, {"submit": "send plan", "result": "wait for result"})
    core = Core(scheduler, executor, ahead=0 if schedule.disable_overlap_schedule else 1)
    process = SchedulerProcess(deployment, core, out)
    poll, step = inbox.poll, process.step
    if recorder is not None:
        poll, step = recorder.wrap("receive requests", poll), recorder.wrap_step(step)
    executor.wait_ready()
    ready()
    while True:
        for message in poll(process.idle):
            process.handle(message)
        if not process.idle:
            process.end_overdue()
            step()
