"""Processes that are killed, and servers that are asked to end."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from .processes import wait_until
from .server import Server
from .stream import Background

KINDS = ("parent", "tokenizer", "scheduler", "rank")
QUIET = ("Traceback", "error:", "ERROR", "Exception")


@pytest.fixture(scope="module")
def port() -> int:
    """A port that every server of this module takes in turn."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def kill_one(kind: str, port: int, *flags: str, rank: int = 0) -> None:
    """Kill one process of a busy server with `kill -9`, and see everything else end."""
    with Server(*flags, "--dtype", "float32", "--kv-cache-tokens", "4096", port=port) as server:
        server.wait_ready()
        clients = [Background(server, max_new_tokens=3000), Background(server, max_new_tokens=3000, stream=False)]
        assert clients[0].started.wait(60)
        assert wait_until(lambda: len(server.info()["running"]) == 2)
        os.kill(server.pids(kind)[rank], signal.SIGKILL)
        outcomes = [client.join() for client in clients]
        assert outcomes == (["closed", "closed"] if kind == "parent" else ["error", "error"])
        if kind != "parent":
            name = f"rank {rank}" if kind == "rank" else kind
            assert all(f"{name} ended unexpectedly (killed by signal 9)" in client.detail for client in clients)
        assert server.traces.gone() == []
        assert server.process.wait(10) == (-signal.SIGKILL if kind == "parent" else 1)
        assert "Traceback" not in server.log, server.log
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


@pytest.mark.parametrize("kind", KINDS)
def test_killing_a_process_ends_all(kind: str, port: int) -> None:
    """S7. Each of these starts on the port of the one before it."""
    kill_one(kind, port, "--dcp", "2")


@pytest.mark.slow
def test_killing_processes_twenty_times(port: int) -> None:
    """S7."""
    choice = random.Random(0)
    for _ in range(20):
        kind = choice.choice(KINDS)
        kill_one(kind, port, "--dcp", "4", rank=choice.randrange(4) if kind == "rank" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_killing_a_process_while_it_starts(kind: str) -> None:
    with Server("--dcp", "2", "--dtype", "float32") as server:
        assert wait_until(lambda: server.process.poll() is not None or server.pids("rank")), server.log
        pids = server.pids(kind)
        assert pids, server.log
        os.kill(pids[0], signal.SIGKILL)
        assert server.process.wait(60) == (-signal.SIGKILL if kind == "parent" else 1)
        assert server.traces.gone() == []
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--kv-cache-tokens", "4096") as running:
        yield running.wait_ready()


def assert_quiet_end(server: Server) -> None:
    assert server.traces.gone() == []
    assert not [mark for mark in QUIET if mark in server.log], server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_ends_quietly(server: Server, number: int) -> None:
    assert server.interrupt(number) == 0
    assert_quiet_end(server)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_busy_server_drains_briefly(server: Server, number: int) -> None:
    short = Background(server, max_new_tokens=8)
    long = Background(server, max_new_tokens=4000)
    whole = Background(server, max_new_tokens=4000, stream=False)
    assert short.started.wait(60)
    assert long.started.wait(60)
    assert wait_until(lambda: len(server.info()["running"]) == 3 or short.outcome)
    assert server.interrupt(number) == 0
    assert short.join() in ("events", "error")
    assert (long.join(), whole.join()) == ("error", "error")
    assert "shutting down" in long.detail
    assert "shutting down" in whole.detail
    assert_quiet_end(server)


def test_while_draining_new_requests_are_refused(server: Server) -> None:
    long = Background(server, max_new_tokens=4000)
    assert long.started.wait(60)
    server.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: "stopping; 1 request(s)" in server.log)
    assert httpx.get(f"{server.url}/health").status_code == 503
    refused = server.post("/generate", {"text": "Hello"})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert server.process.wait(30) == 0
    assert_quiet_end(server)


def test_a_second_interrupt_kills(server: Server) -> None:
    long = Background(server, max_new_tokens=4000)
    assert long.started.wait(60)
    server.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: "stopping; 1 request(s)" in server.log)
    assert server.interrupt() == 130
    assert long.join() == "closed"
    assert_quiet_end(server)


@pytest.mark.parametrize("phase", ["listening", "planned", "spawned", "loaded"])
def test_an_interrupt_while_starting(phase: str, port: int) -> None:
    with Server("--dcp", "2", "--dtype", "float32", port=port) as server:
        reached: dict[str, Callable[[], object]] = {
            "listening": lambda: listens(port),
            "planned": lambda: "grid: " in server.log,
            "spawned": lambda: server.pids("rank"),
            "loaded": lambda: "weights loaded" in server.log,
        }
        assert wait_until(reached[phase]), server.log
        assert server.interrupt() == 0, server.log
        assert_quiet_end(server)


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_two_servers_at_once(server: Server) -> None:
    """S8."""
    with Server("--dcp", "2", "--dtype", "float32", "--kv-cache-tokens", "4096") as other:
        other.wait_ready()
        clients = [Background(one, max_new_tokens=12, rid="same") for one in (server, other)]
        assert [client.join() for client in clients] == ["events", "events"]
        texts = [one.generate("The capital of France is", max_new_tokens=5)["text"] for one in (server, other)]
        assert texts[0] == texts[1]
        assert other.interrupt() == 0
        assert other.traces.gone() == []
    assert server.generate("Hello", max_new_tokens=1)["output_ids"]


def test_a_start_sweeps_what_a_machine_crash_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All processes killed at once, as by a lost power line: the directory stays, until the next start."""
    with Server("--dtype", "float32") as server:
        server.wait_ready()
        for pid in [*server.pids("parent"), *server.pids("tokenizer"), *server.pids("scheduler"), *server.pids("rank")]:
            os.kill(pid, signal.SIGSTOP)
        for pid in [*server.pids("tokenizer"), *server.pids("scheduler"), *server.pids("rank"), *server.pids("parent")]:
            os.kill(pid, signal.SIGKILL)
        server.process.wait(10)
        left = list(server.tmpdir.glob("dcprt-*"))
        assert len(left) == 1
        with Server("--dtype", "float32", env={"TMPDIR": str(server.tmpdir)}) as other:
            other.wait_ready()
            assert not left[0].exists()
            assert other.interrupt() == 0
        assert server.traces.gone() == []
