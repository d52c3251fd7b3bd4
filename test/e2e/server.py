"""A real server as a child process of the tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai

from .processes import Traces, is_alive, role, wait_until, with_tmpdir

MODEL = "smollm2-135m"
START_S = 180.0


class Server:
    """`python -m dcprt.launch_server` with a temporary directory of its own."""

    def __init__(self, *flags: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="dcprt-e2e-"))
        self.tmpdir = self.home / "tmp"
        self.tmpdir.mkdir()
        self.traces = Traces(self.tmpdir)
        self.url = ""
        self._log = self.home / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dcprt.launch_server", "--port", str(port), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self.tmpdir), **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text()

    def wait_ready(self) -> Server:
        """Until the ready line is there."""
        assert wait_until(lambda: "ready: " in self.log or self.process.poll() is not None, START_S), self.log
        found = re.search(r"ready: (http://\S+)", self.log)
        assert found, self.log
        self.url = found[1]
        return self

    def pids(self, kind: str) -> list[int]:
        """Process ids of `parent`, `tokenizer`, `scheduler` or `rank`."""
        if kind == "parent":
            return [self.process.pid]
        return [pid for pid in with_tmpdir(self.tmpdir) if role(pid) == kind]

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=300)

    def post(self, path: str, body: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return httpx.post(f"{self.url}{path}", content=json.dumps(body), headers=headers, timeout=300)

    def generate(self, prompt: str | list[int], *, salt: str = "", **sampling: Any) -> dict[str, Any]:
        """One greedy answer of `/generate`, unless `sampling` says otherwise."""
        body: dict[str, Any] = {"sampling_params": {"temperature": 0, **sampling}, "cache_salt": salt}
        response = self.post("/generate", {**body, "text" if isinstance(prompt, str) else "input_ids": prompt})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def info(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/server_info", timeout=300)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def settle(self) -> dict[str, Any]:
        """The state once nothing runs and nothing waits."""
        state: dict[str, Any] = {}

        def idle() -> bool:
            state.update(self.info())
            return not state["running"] and not state["waiting"]

        assert wait_until(idle, 120), state
        return state

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Send a signal to the parent alone; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def stop(self) -> None:
        """End it whatever state it is in, and remove its files."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.traces.left() and with_tmpdir(self.tmpdir):
            wait_until(lambda pid=pid: not is_alive(pid), 10)
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)
