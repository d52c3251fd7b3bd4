"""The scheduler's process: requests from the tokenizer, plans to the workers, tokens back. Alone looks at a clock."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

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
    client_id,
    unpack_tokens,
)
from dcprt.planner.deployment import Deployment
from dcprt.runtime.channel import Launch
from dcprt.runtime.report import BusyLine, finished_line, snapshot
from dcprt.scheduler.core import Core
from dcprt.scheduler.request import Request
from dcprt.scheduler.scheduler import Limits, Scheduler
from dcprt.scheduler.store import KVStore
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
        self._busy = BusyLine(deployment)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def handle(self, message: ToScheduler) -> None:
        """One message from the tokenizer."""
        if isinstance(message, TokenRequest):
            self._add(message)
        elif isinstance(message, Abort):
            self._abort(message.rid)
        elif isinstance(message, StopHit):
            self._stop(message)
        elif isinstance(message, Query):
            self._out.send([Reply(qid=message.qid, body=snapshot(self._scheduler, self._deployment))])

    def step(self) -> None:
        """Compute one step and send its tokens."""
        outputs = self._core.step()
        now = time.monotonic()
        for output in outputs:
            request = self._requests[output.rid]
            request.first_token = request.first_token or now
            if output.finish:
                self._done(request, output.finish.reason)
        self._out.send(outputs)
        self._busy.tick(self._scheduler, now)

    def _add(self, message: TokenRequest) -> None:
        try:
            request = self._request(message)
            self._scheduler.add(request)
        except RequestError as error:
            log.info("request %s refused: %s", client_id(message.rid), error)
            self._out.send([RequestFailed.of(message.rid, error)])
            return
        self._requests[request.rid] = request
        self._out.send([Accepted(rid=request.rid, prompt_len=request.prompt_len)])

    def _request(self, message: TokenRequest) -> Request:
        """Validate; raises RequestError."""
        tokens, limits = unpack_tokens(message.token_ids), self._scheduler.limits
        if not tokens:
            raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
        if not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
            wrong = next(t for t in tokens if not 0 <= t < limits.vocab_size)
            raise RequestError(f"Token id {wrong} is not in the vocabulary of {limits.vocab_size}.", param="prompt")
        self._arrivals += 1
        return Request(
            rid=message.rid,
            tokens=tokens,
            prompt_len=len(tokens),
            max_tokens=limits.output_room(len(tokens), message.sampling.max_tokens),
            sampling=message.sampling,
            seed=self._seed(message),
            namespace=message.namespace,
            arrival=time.monotonic(),
        )

    def _seed(self, message: TokenRequest) -> int:
        """The request's own seed, or the next of the series that `--random-seed` begins."""
        if message.sampling.seed is not None:
            return message.sampling.seed % 2**64
        text = f"{self._deployment.config.schedule.random_seed}/{self._arrivals}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _abort(self, rid: str) -> None:
        request = self._scheduler.end(rid)
        if request is not None:
            self._done(request, "abort")
            finish = Finish(reason="abort")
            self._out.send([TokensOut(rid=rid, token_ids=[], usage=request.usage, finish=finish)])

    def _stop(self, message: StopHit) -> None:
        """The client has its last message already; here only the pages remain."""
        request = self._scheduler.end(message.rid)
        if request is not None:
            self._done(request, "stop")

    def _done(self, request: Request, reason: str) -> None:
        del self._requests[request.rid]
        log.info("%s", finished_line(request, reason, time.monotonic()))


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
    core = Core(Scheduler(store, deployment.config.schedule, limits), executor)
    process = SchedulerProcess(deployment, core, out)
    executor.wait_ready()
    ready()
    while True:
        for message in inbox.poll(wait=process.idle):
            process.handle(message)
        if not process.idle:
            process.step()
