"""Server-sent events as a client sees them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from .server import Server


def parse(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None for `[DONE]`."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


@contextmanager
def open_stream(server: Server, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any] | None]]:
    """A stream under way; leaving the context disconnects."""
    with (
        httpx.Client(timeout=300) as client,
        client.stream("POST", f"{server.url}{path}", json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        yield parse(response)


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream that must end with `[DONE]`."""
    with open_stream(server, path, body) as stream:
        found = list(stream)
    assert found[-1] is None
    assert None not in found[:-1]
    return [event for event in found if event is not None]


class Background:
    """A request in a thread of its own; `outcome` is what its client saw in the end.

    `events`: the stream ended with `[DONE]`; `error`: an error event or status; `closed`: the connection broke.
    `last` is the last event or the whole answer, `headers` are those of the response.
    """

    def __init__(self, server: Server, *, max_new_tokens: int, stream: bool = True, **body: Any) -> None:
        """`body` are further fields; a prompt in it replaces the usual one."""
        self.started = threading.Event()
        self.outcome = ""
        self.detail = ""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.last: dict[str, Any] = {}
        self._socket: socket.socket | None = None
        self._url = f"{server.url}/generate"
        self._body = {
            **({} if "input_ids" in body else {"text": "Once upon a time"}),
            **body,
            "stream": stream,
            "sampling_params": {
                "temperature": 0,
                "ignore_eos": True,
                "max_new_tokens": max_new_tokens,
                **body.get("sampling_params", {}),
            },
        }
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, seconds: float = 120) -> str:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the client never got an answer"
        return self.outcome

    @property
    def rid(self) -> str:
        return str(self._body["rid"])

    def leave(self) -> None:
        """Close the connection of a stream that has begun."""
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def finish_reason(self) -> str:
        """Why it ended, as the last event says."""
        return str(self.last["meta_info"]["finish_reason"]["type"])

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=300) as response:
                self.status, self.headers = response.status_code, dict(response.headers)
                self._socket = response.extensions["network_stream"].get_extra_info("socket")
                if response.status_code != 200:
                    self.detail = json.loads(response.read())["error"]["message"]
                    self.outcome = "error"
                    return
                self._read(response)
        except httpx.HTTPError as error:
            self.outcome, self.detail = "closed", repr(error)
        finally:
            self.started.set()

    def _read(self, response: httpx.Response) -> None:
        self.outcome = "closed"
        if not self._body["stream"]:
            self.last = json.loads(response.read())
            self.outcome = "events"
            return
        for event in parse(response):
            self.started.set()
            if event is None:
                self.outcome = "error" if self.outcome == "error" else "events"
            elif "error" in event:
                self.outcome, self.detail = "error", event["error"]["message"]
            if event is not None:
                self.last = event
