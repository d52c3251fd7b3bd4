"""Starts the children, hears from them, and sees to it that all end together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import dcprt
from dcprt import trace
from dcprt.comm.arena import Arenas, create_arenas
from dcprt.errors import RuntimeFailed
from dcprt.planner.deployment import Deployment
from dcprt.runtime.channel import Channel, ChildFailed, ChildReady, Goodbye, Launch, Report
from dcprt.runtime.rundir import RunDir

log = logging.getLogger("dcprt")

GRACE_S = 5.0
"""How long children may take to end by themselves."""

PASSIVE_OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""With spinning threads, one busy neighbour slows every rank down by an order of magnitude."""


STEADY_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304"}
"""Steps have ever other shapes: left to itself, glibc raises its threshold to the largest buffer it has seen, and from
then on keeps such buffers in a heap that their different sizes fragment. With a fixed one they go back at once."""


@dataclass
class Child:
    """A child process and the parent's end of the line to it."""

    name: str
    process: subprocess.Popen[bytes]
    channel: Channel


class Supervisor:
    """All children of one server or engine. Lives in one event loop.

    `failure` is done, with the reason, as soon as any child ends that was not asked to.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.run_dir = RunDir.create()
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._deployment = deployment
        self._arenas: Arenas | None = None
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._unready: set[str] = set()
        self._all_ready = asyncio.Event()
        self._closing = False

    def start(self) -> None:
        """Start tokenizer, scheduler and one worker per rank; returns at once."""
        ranks = self._deployment.grid.tp
        if self._deployment.comm == "shm":
            self._arenas = create_arenas(ranks, self._deployment.grid.dcp)
        self._spawn("tokenizer", "tokenizer", Launch(deployment=self._deployment, run_dir=str(self.run_dir.path)))
        self._spawn("scheduler", "scheduler", Launch(deployment=self._deployment, run_dir=str(self.run_dir.path)))
        for rank in range(ranks):
            launch = Launch(deployment=self._deployment, run_dir=str(self.run_dir.path), rank=rank, arenas=self._arenas)
            self._spawn(f"rank {rank}", "rank", launch)
        if self._arenas is not None:
            self._arenas.close()

    async def ready(self) -> None:
        """Wait until every child has set itself up.

        Raises:
            RuntimeFailed: a child ended instead; with its reason.
        """
        waiter = asyncio.ensure_future(self._all_ready.wait())
        try:
            await asyncio.wait((waiter, self.failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self.failure.done():
            raise RuntimeFailed(self.failure.result())

    async def close(self) -> None:
        """End all children: those that do not go by themselves within a few seconds are killed."""
        self._closing = True
        for child in self._children:
            with suppress(OSError):
                child.channel.send(Goodbye())
                child.channel.sock.shutdown(socket.SHUT_RDWR)
        await asyncio.gather(*self._watchers)
        await asyncio.to_thread(self._reap)
        await asyncio.to_thread(self._write_profile)
        self.run_dir.leave()
        if not self.failure.done():
            self.failure.cancel()

    def _reap(self) -> None:
        for child in self._children:
            try:
                child.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.channel.close()

    def _write_profile(self) -> None:
        """The trace that `--profile-steps` asks for."""
        out = self._deployment.config.server.profile_steps
        if out is None:
            return
        try:
            trace.collect(self.run_dir.path, out)
            log.info("profile of the last steps is in %s", out)
        except OSError as error:
            log.error("cannot write the profile to %s: %s", out, error.strerror)

    def _spawn(self, name: str, role: str, launch: Launch) -> None:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dcprt.runtime.child", role, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *(launch.arenas.fds if launch.arenas else ())),
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=self._environment(role),
            process_group=0,
        )
        theirs.close()
        child = Child(name, process, Channel(ours))
        child.channel.send(launch)
        ours.setblocking(False)
        self._children.append(child)
        self._unready.add(name)
        self._watchers.append(asyncio.create_task(self._watch(child)))

    def _environment(self, role: str) -> dict[str, str]:
        """The parent's, with dcprt importable however the parent found it, and calm threads for workers."""
        root = str(Path(dcprt.__file__).parent.parent)
        path = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
        if role == "rank":
            environment |= {**STEADY_MALLOC, **PASSIVE_OPENMP, "OMP_NUM_THREADS": str(self._deployment.threads)}
        return environment

    async def _watch(self, child: Child) -> None:
        """Read the child's reports until it is gone."""
        loop = asyncio.get_running_loop()
        reason = None
        while (report := await _read_report(loop, child.channel.sock)) is not None:
            if isinstance(report, ChildReady):
                self._unready.discard(child.name)
                if not self._unready and len(self._children) == self._deployment.grid.tp + 2:
                    self._all_ready.set()
            elif isinstance(report, ChildFailed):
                reason = report.reason
        if not self._closing and not self.failure.done():
            if reason is None:
                code = await asyncio.to_thread(child.process.wait)
                reason = f"{child.name} ended unexpectedly ({_describe(code)})"
            if not self.failure.done():
                self.failure.set_result(reason)


def _describe(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


async def _read_report(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Report | None:
    header = await _read(loop, sock, 4)
    if header is None:
        return None
    body = await _read(loop, sock, struct.unpack("<I", header)[0])
    return None if body is None else msgspec.json.decode(body, type=Report)


async def _read(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            part = await loop.sock_recv(sock, size - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return data
