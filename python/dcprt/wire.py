"""Typed one-way pipes between processes: lists of messages over zmq, in MessagePack.

An endpoint is data (`ipc://...` in the run directory). Queues are unbounded, since each request has a bounded number
of messages, and nothing is waited for when a socket closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")


def endpoint(directory: str | Path, name: str) -> str:
    """The address of pipe `name` of the server that runs in `directory`."""
    return f"ipc://{directory}/{name}"


def _socket(context: Any, kind: int, address: str, bind: bool) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def _readable(socket: Any) -> bool:
    return bool(socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)


class Sender:
    """The writing end. Sending never blocks."""

    def __init__(self, context: zmq.Context[Any], address: str, *, bind: bool = False) -> None:
        self._socket = _socket(context, zmq.PUSH, address, bind)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, messages: Sequence[object]) -> None:
        """Send `messages` as one frame; nothing, if there are none."""
        if messages:
            self._socket.send(self._encoder.encode(messages))

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """The reading end of a process that waits. `kind` is the union of the messages that may come."""

    def __init__(self, context: zmq.Context[Any], address: str, kind: Any, *, bind: bool = True) -> None:
        self._socket = _socket(context, zmq.PULL, address, bind)
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[kind])

    def poll(self, wait: bool) -> list[T]:
        """All messages that are there; with `wait`, at least one frame."""
        messages = self._decoder.decode(self._socket.recv()) if wait else []
        while _readable(self._socket):
            messages += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return messages

    def close(self) -> None:
        self._socket.close()


class AsyncReceiver(Generic[T]):
    """The reading end in an event loop, which watches the socket itself: a future for every frame costs more."""

    MOST = 64
    """Frames that are handed on before others in the loop have their turn."""

    def __init__(self, context: zmq.Context[Any], address: str, kind: Any) -> None:
        self._socket = _socket(context, zmq.PULL, address, True)
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[kind])

    async def serve(self, take: Callable[[list[T]], None]) -> None:
        """Call `take` with the messages of each frame, until cancelled or until it raises."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        descriptor = self._socket.getsockopt(zmq.FD)
        loop.add_reader(descriptor, changed.set)
        try:
            while True:
                # The descriptor says once that something has changed; hence all that is there is read.
                for _ in range(self.MOST):
                    if not _readable(self._socket):
                        changed.clear()
                        await changed.wait()
                        break
                    take(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
                else:
                    await asyncio.sleep(0)
        finally:
            loop.remove_reader(descriptor)

    def close(self) -> None:
        self._socket.close()
