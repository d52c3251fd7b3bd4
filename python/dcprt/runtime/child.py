"""How every child process starts: `python -m dcprt.runtime.child ROLE FD`."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import MappingProxyType
from typing import NoReturn

from dcprt import trace
from dcprt.errors import DcprtError
from dcprt.runtime import logs
from dcprt.runtime.channel import Channel, ChildFailed, ChildReady, Goodbye, Launch, Report
from dcprt.runtime.rundir import RunDir

ROLES = MappingProxyType(
    {
        "tokenizer": "dcprt.tokenizer.process",
        "scheduler": "dcprt.runtime.scheduler_process",
        "rank": "dcprt.runtime.worker_process",
    }
)
"""Role to the module whose `run(launch, ready)` is that process; imported only there."""


def main(role: str, fd: int) -> None:
    """Live until the parent goes, or until `run` raises; then tell the parent why."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    launch: Launch | None = channel.recv(Launch)
    if launch is None:
        return
    name = f"rank {launch.rank}" if role == "rank" else role
    log = logs.setup(name, launch.deployment.config.server.log_level)
    try:
        run_dir = RunDir.join(launch.run_dir)
    except OSError:
        return
    profile = launch.deployment.config.server.profile_steps if role == "scheduler" else None
    _end_with_parent(channel, run_dir, profile)
    run: Callable[[Launch, Callable[[], None]], None] = importlib.import_module(ROLES[role]).run
    try:
        run(launch, lambda: _ready(channel))
    except DcprtError as error:
        _fail(channel, run_dir, log, f"{name}: {error}")
    except Exception as error:  # the border of the process: nothing may vanish without a word
        log.exception("ended by an unexpected error")
        _fail(channel, run_dir, log, f"{name}: {type(error).__name__}: {error}")


def _ready(channel: Channel) -> None:
    """What is there by now stays, so the garbage collector need not look at it in the middle of a step."""
    gc.collect()
    gc.freeze()
    _report(channel, ChildReady())


def _fail(channel: Channel, run_dir: RunDir, log: logging.Logger, reason: str) -> NoReturn:
    log.error("%s", reason.partition(": ")[2])
    _report(channel, ChildFailed(reason=reason))
    run_dir.leave()
    os._exit(1)


def _report(channel: Channel, report: Report) -> None:
    """Tell the parent, unless it has closed the line; then this process is about to end anyway."""
    with suppress(OSError):
        channel.send(report)


def _end_with_parent(channel: Channel, run_dir: RunDir, profile: str | None) -> None:
    """End this process as soon as the parent says so or is dead, whatever else is going on here.

    `profile` is the file for the trace of the last steps, which is left to this process if the parent is dead.
    """

    def watch() -> None:
        parent_is_dead = channel.recv(Goodbye) is None
        if parent_is_dead and profile is not None:
            with suppress(OSError):
                trace.collect(run_dir.path, profile)
        run_dir.leave(patient=parent_is_dead)
        os._exit(0)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
