"""Reading frames in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from dcprt.messages import Abort
from dcprt.wire import AsyncReceiver, Sender, endpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Any:
    return request.param


class Pipe:
    """Both ends; what was read is in `taken`."""

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        address = endpoint(directory, "pipe")
        self.receiver: AsyncReceiver[Abort] = AsyncReceiver(context, address, Abort)
        self.sender = Sender(context, address)
        self.taken: list[str] = []

    def send(self, first: int, stop: int) -> None:
        for i in range(first, stop):
            self.sender.send([Abort(rid=str(i))])

    def take(self, messages: list[Abort]) -> None:
        self.taken += [message.rid for message in messages]

    @asynccontextmanager
    async def read(self, take: Callable[[list[Abort]], None]) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.receiver.serve(take))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.taken) < count:
                await asyncio.sleep(0.001)


def ids(stop: int) -> list[str]:
    return [str(i) for i in range(stop)]


@pytest.mark.parametrize("count", [1, AsyncReceiver.MOST - 1, AsyncReceiver.MOST, AsyncReceiver.MOST + 1, 1000])
def test_all_frames_come_in_order(context: zmq.Context[Any], tmp_path: Path, run: Any, count: int) -> None:
    """Those that were there before, and one after a silence."""

    async def work() -> None:
        pipe = Pipe(context, tmp_path)
        pipe.send(0, count)
        await asyncio.sleep(0.05)
        async with pipe.read(pipe.take):
            await pipe.until(count)
            await asyncio.sleep(0.02)
            pipe.send(count, count + 1)
            await pipe.until(count + 1)
            assert pipe.taken == ids(count + 1)

    run(work())


def test_frames_sent_while_others_are_taken(context: zmq.Context[Any], tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        pipe = Pipe(context, tmp_path)

        def take(messages: list[Abort]) -> None:
            pipe.take(messages)
            if len(pipe.taken) < 300:
                pipe.send(len(pipe.taken), len(pipe.taken) + 1)

        async with pipe.read(take):
            pipe.send(0, 1)
            await pipe.until(300)
            assert pipe.taken == ids(300)

    run(work())


def test_what_is_raised_ends_the_reading(context: zmq.Context[Any], tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        pipe = Pipe(context, tmp_path)
        pipe.send(0, 3)

        def take(messages: list[Abort]) -> None:
            pipe.take(messages)
            raise LookupError("on purpose")

        with pytest.raises(LookupError, match="on purpose"):
            await _within(pipe.receiver.serve(take))
        await asyncio.sleep(0.05)
        assert pipe.taken == ids(1)
        async with pipe.read(pipe.take):
            await pipe.until(3)
        pipe.receiver.close()

    run(work())


async def _within(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(20):
        await work
