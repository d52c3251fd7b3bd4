"""The line between parent and child: one inherited socket pair per child.

The parent sends the launch message and a goodbye, the child reports ready or failed, and either end sees the other's
death as the end of the stream.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from dcprt.comm.arena import Arenas
from dcprt.messages import Message
from dcprt.planner.deployment import Deployment

_HEADER = struct.Struct("<I")


class Launch(Message, frozen=True):
    """What a child is told: the deployment, the run directory, its rank, and the shared memory it inherits."""

    deployment: Deployment
    run_dir: str
    rank: int = 0
    arenas: Arenas | None = None


class Goodbye(Message, frozen=True):
    """The child is to end; the parent waits for it, and cleans up."""


class ChildReady(Message, frozen=True):
    """The child has set itself up."""


class ChildFailed(Message, frozen=True):
    """The child ends because of an error; the text is for the user."""

    reason: str


Report = ChildReady | ChildFailed


class Channel:
    """One end. `recv` waits; the parent uses the socket in its event loop instead."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Message) -> None:
        data = msgspec.json.encode(message)
        self.sock.sendall(_HEADER.pack(len(data)) + data)

    def recv(self, kind: Any) -> Any:
        """The next message of type `kind`, or None when the other end is gone."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        body = self._read(_HEADER.unpack(header)[0])
        return None if body is None else msgspec.json.decode(body, type=kind)

    def _read(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                part = self.sock.recv(size - len(data))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return data

    def close(self) -> None:
        self.sock.close()
