"""One request over HTTP, and when its tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from serving.prompts import Prompt, Vocabulary

DONE = b"[DONE]"


@dataclass
class Outcome:
    """What became of one request. Times are seconds since the run began, tokens are the server's own count."""

    scheduled: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """When each chunk with text came."""
    tokens_by_chunk: list[int] = field(default_factory=list)
    """Output tokens up to and with each chunk, where the server tells with every chunk."""
    last: float = 0.0
    """When the last chunk with text or with the reason of the end came, or the failure."""
    asked_input: int = 0
    asked_output: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def first(self) -> float:
        """When the first token came; if none of the output can be seen, when its end did."""
        return self.chunks[0] if self.chunks else self.last

    def take(self, event: dict[str, Any], now: float) -> None:
        """Note one event of the stream."""
        if problem := event.get("error") or (event if event.get("object") == "error" else None):
            self.error = self.error or f"in the stream: {_message(problem)}"
        usage = event.get("usage")
        if usage:
            self.input_tokens = usage["prompt_tokens"]
            self.output_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached_tokens)
        for choice in event.get("choices") or ():
            text = _text(choice)
            if text:
                self.chunks.append(now)
                if usage:
                    self.tokens_by_chunk.append(self.output_tokens)
            reason = choice.get("finish_reason")
            if reason in ("abort", "error"):
                self.error = self.error or f"finish_reason {reason}"
            if text or reason:
                self.last = now


def _text(choice: dict[str, Any]) -> str:
    """New text in a choice, be it of a completion or of a chat, thought or said."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _message(problem: Any) -> str:
    return str(problem.get("message", problem)) if isinstance(problem, dict) else str(problem)


class Events:
    """Cuts a byte stream of server-sent events into the data of each; a line may come in parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Data of the events that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


@dataclass(frozen=True)
class Shape:
    """How requests look on the wire."""

    path: str
    chat: bool
    as_text: bool
    fields: dict[str, Any]
    """Fields that all requests have."""

    def body(self, prompt: Prompt, output_len: int, vocabulary: Vocabulary) -> bytes:
        """JSON of one request."""
        body: dict[str, Any] = {"max_tokens": output_len, "stream": True, **self.fields}
        if self.chat:
            body["messages"] = [{"role": "user", "content": vocabulary.text(prompt)}]
        else:
            body["prompt"] = vocabulary.text(prompt) if self.as_text else vocabulary.tokens(prompt)
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


class Client:
    """Sends requests, and tells the time of one run."""

    def __init__(self, http: httpx.AsyncClient, path: str, timeout_s: float) -> None:
        self._http = http
        self._path = path
        self._timeout_s = timeout_s
        self._began = time.perf_counter()

    def begin(self) -> None:
        """The run begins now."""
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    async def send(self, body: bytes, outcome: Outcome) -> None:
        """One request to its end, good or bad; whatever happens is noted in `outcome`."""
        outcome.sent = self.now()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, outcome)
        except TimeoutError:
            outcome.error = f"no answer within {self._timeout_s:g} s (--request-timeout)"
        except (httpx.HTTPError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
            outcome.error = f"the stream is not as expected: {type(error).__name__}: {error}"
        if outcome.error or not outcome.last:
            outcome.last = self.now()

    async def _stream(self, body: bytes, outcome: Outcome) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", self._path, content=body, headers=headers) as response:
            if response.status_code != 200:
                outcome.error = f"HTTP {response.status_code}: {refusal(await response.aread())}"
                return
            events, done = Events(), False
            async for data in response.aiter_bytes():
                now = self.now()
                for event in events.feed(data):
                    if event == DONE:
                        done = True
                    else:
                        outcome.take(orjson.loads(event), now)
        outcome.error = outcome.error or _missing(outcome, done)


def _missing(outcome: Outcome, done: bool) -> str:
    """What a whole stream has and this one has not; nothing if it is whole."""
    if not done:
        return "the stream ended without [DONE]"
    if not outcome.input_tokens:
        return "no usage in the stream, so its tokens cannot be counted"
    return "" if outcome.output_tokens else "no tokens came"


def refusal(body: bytes) -> str:
    """The message in an error's body, or its beginning."""
    try:
        answer = orjson.loads(body)
        found = answer.get("error") or answer.get("message") or answer.get("detail") or answer
        return _message(found)[:300]
    except (orjson.JSONDecodeError, AttributeError):
        return body.decode(errors="replace")[:300]
