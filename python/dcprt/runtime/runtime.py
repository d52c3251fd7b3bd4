"""A running model as its clients see it: requests in, events out. The API server and the Engine are both on it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from dcprt.errors import DcprtError, RequestError, RuntimeFailed
from dcprt.messages import (
    Abort,
    Accepted,
    FromTokenizer,
    Query,
    Reply,
    RequestFailed,
    TextOut,
    TextRequest,
    wire_id,
)
from dcprt.planner.deployment import Deployment
from dcprt.runtime.supervisor import Supervisor
from dcprt.wire import AsyncReceiver, Sender, endpoint

log = logging.getLogger("dcprt")


Event = FromTokenizer | RuntimeFailed


class Stream:
    """The events of one request. Iterate until the one with `finish`; leaving early aborts the request.

    With `put`, events go there, for who reads them in another thread: each is given to `read`, and in the end the loop
    calls `close`.
    """

    def __init__(self, runtime: Runtime, rid: str, wire: str, put: Callable[[Event], None] | None = None) -> None:
        self.rid = rid
        self.wire = wire
        self.prompt_len = 0
        self.ended = False
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.put = put or self._queue.put_nowait
        self._runtime = runtime

    async def accepted(self) -> None:
        """Wait until the request is known to be valid.

        Raises:
            RequestError: it is not.
            RuntimeFailed: the server is going down.
        """
        event = await self._next()
        assert isinstance(event, Accepted), event
        self.prompt_len = event.prompt_len

    async def __aiter__(self) -> AsyncIterator[TextOut]:
        try:
            while not self.ended:
                event = await self._next()
                if isinstance(event, TextOut):
                    yield event
        finally:
            self.close()

    def read(self, event: Event) -> FromTokenizer:
        """The next event as it is, unless it says that there is no more.

        Raises:
            RequestError: the request failed.
            RuntimeFailed: the server is going down.
        """
        if isinstance(event, RequestFailed | RuntimeFailed):
            self.ended = True
            raise event.error() if isinstance(event, RequestFailed) else event
        self.ended = isinstance(event, TextOut) and event.finish is not None
        return event

    def close(self) -> None:
        """Abort the request if it has not ended; forget it in any case."""
        self._runtime.forget(self, abort=not self.ended)
        self.ended = True

    async def _next(self) -> FromTokenizer:
        try:
            return self.read(await self._queue.get())
        except (asyncio.CancelledError, DcprtError):
            self.close()
            raise


class Runtime:
    """Supervisor and sockets. Make it inside an event loop; `start`, `ready`, and in the end `close`."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.supervisor = Supervisor(deployment)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        run_dir = self.supervisor.run_dir.path
        self._out = Sender(self._context, endpoint(run_dir, "requests"))
        self._inbox: AsyncReceiver[FromTokenizer] = AsyncReceiver(
            self._context, endpoint(run_dir, "texts"), FromTokenizer
        )
        self._streams: dict[str, Stream] = {}
        self._wires: dict[str, str] = {}
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        self._failed: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_ready = False

    def start(self) -> None:
        """Start all processes; returns at once."""
        self.supervisor.start()
        self._tasks = [
            asyncio.create_task(self._inbox.serve(self._receive)),
            asyncio.create_task(self._fail_with_supervisor()),
        ]

    async def ready(self) -> None:
        """Wait until requests are served.

        Raises:
            RuntimeFailed: a process ended instead.
        """
        await self.supervisor.ready()
        self.is_ready = True

    def submit(self, request: TextRequest, put: Callable[[Event], None] | None = None) -> Stream:
        """Start a request; `put` as in `Stream`.

        Raises:
            RequestError: a live request has the same id, or the request has values that no message can carry.
            RuntimeFailed: the server is going down.
        """
        if self._failed is not None:
            raise RuntimeFailed(self._failed)
        if request.rid in self._wires:
            raise RequestError(f"A request with id {request.rid!r} is running already.", param="rid")
        wire = wire_id(request.rid, next(self._numbers))
        self._send(msgspec.structs.replace(request, rid=wire), "prompt" if request.chat is None else "messages")
        self._wires[request.rid] = wire
        stream = self._streams[wire] = Stream(self, request.rid, wire, put)
        return stream

    def forget(self, stream: Stream, *, abort: bool) -> None:
        """Drop a stream; with `abort`, end its request."""
        if self._streams.pop(stream.wire, None) is None:
            return
        self._wires.pop(stream.rid, None)
        if abort and self._failed is None:
            self._out.send([Abort(rid=stream.wire)])

    def live_rids(self) -> list[str]:
        """The ids of all live requests."""
        return list(self._wires)

    def abort(self, rid: str) -> bool:
        """End a live request; its stream gets a last event. False if there is none with this id."""
        wire = self._wires.get(rid)
        if wire is None or self._failed is not None:
            return False
        self._out.send([Abort(rid=wire)])
        return True

    async def query(self, kind: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask tokenizer or scheduler; see `Query` for the kinds.

        Raises:
            RequestError: the question makes no sense.
            RuntimeFailed: the server is going down.
        """
        if self._failed is not None:
            raise RuntimeFailed(self._failed)
        qid = next(self._numbers)
        future = self._replies[qid] = asyncio.get_running_loop().create_future()
        try:
            self._send(Query(qid=qid, kind=kind, body=body or {}), None)
            reply: Reply = await future
            if reply.failed is not None:
                raise reply.failed.error()
            return reply.body
        finally:
            self._replies.pop(qid, None)

    def _send(self, message: TextRequest | Query, param: str | None) -> None:
        """Raises RequestError for a value that no message can carry, most likely in `param`."""
        try:
            self._out.send([message])
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
            raise RequestError(f"The {param or 'request'} cannot be encoded: {error}.", param=param) from error

    async def close(self) -> None:
        """End all requests and all processes."""
        self._fail("The server is shutting down.")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.supervisor.close()
        self._out.close()
        self._inbox.close()
        self._context.term()

    def _receive(self, messages: list[FromTokenizer]) -> None:
        for message in messages:
            if isinstance(message, Reply):
                future = self._replies.get(message.qid)
                if future is not None and not future.done():
                    future.set_result(message)
            elif stream := self._streams.get(message.rid):
                stream.put(message)

    async def _fail_with_supervisor(self) -> None:
        with suppress(asyncio.CancelledError):
            self._fail(await asyncio.shield(self.supervisor.failure))

    def _fail(self, reason: str) -> None:
        """Tell every client once."""
        if self._failed is not None:
            return
        self._failed = reason
        self.is_ready = False
        for stream in list(self._streams.values()):
            stream.put(RuntimeFailed(reason))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(RuntimeFailed(reason))
