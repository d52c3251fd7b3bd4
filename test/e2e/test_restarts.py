"""S7: killed and started again on one port, over and over."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from . import tiny as tiny_models
from .server import Server
from .stream import Background

KINDS = ("parent", "rank", "parent", "scheduler", "parent", "tokenizer")
ROUNDS = 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_restarts_leave_nothing(tiny_model: Path) -> None:
    """Each round starts on the port of the one before it, answers, and is killed with `kill -9` while it works."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    flags = (*tiny_models.flags(tiny_model), "--dcp", "2", "--kv-cache-tokens", "8192")
    first: list[int] = []
    for i in range(ROUNDS):
        kind = KINDS[i % len(KINDS)]
        with Server(*flags, port=port) as server:
            server.wait_ready()
            assert server.url.endswith(f":{port}")
            tokens = server.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True)["output_ids"]
            assert tokens == (first := first or tokens)
            client = Background(server, max_new_tokens=8000)
            assert client.started.wait(60)
            os.kill(server.pids(kind)[-1], signal.SIGKILL)
            assert client.join() == ("closed" if kind == "parent" else "error")
            assert server.traces.gone() == [], (i, kind)
            assert server.process.wait(10) == (-signal.SIGKILL if kind == "parent" else 1)
            assert "Traceback" not in server.log, server.log
