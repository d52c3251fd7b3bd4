"""Reading streams, and load on a server that is a function."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from serving.client import Client, Events, Outcome, Shape, refusal
from serving.load import run
from serving.prompts import Piece, Source, Vocabulary
from serving.workloads import random_requests

WORDS = Vocabulary(1000, 30000, seed=0)
SHAPE = Shape("/v1/completions", chat=False, as_text=False, fields={"model": "m"})
USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
GOOD = [
    {"choices": [{"text": ""}], "usage": None},
    {"choices": [{"text": "a"}], "usage": None},
    {"choices": [{"text": "bc", "finish_reason": "length"}], "usage": None},
    {"choices": [], "usage": USAGE},
]


def stream(*events: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    return "".join(lines).encode()


def answer(reply: Callable[[httpx.Request], Any], timeout_s: float = 60) -> Outcome:
    """What becomes of one request to a server that does `reply`."""

    async def ask() -> Outcome:
        outcome = Outcome(0.0, asked_input=4, asked_output=3)
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url="http://test") as http:
            await Client(http, SHAPE.path, timeout_s).send(b"{}", outcome)
        return outcome

    return asyncio.run(ask())


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_events_may_come_in_any_parts(step: int) -> None:
    data = b': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    events = Events()
    found = [event for i in range(0, len(data), step) for event in events.feed(data[i : i + step])]
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_the_body_of_a_completion_has_the_ids() -> None:
    body = json.loads(SHAPE.body((Piece(Source.UNIQUE, 1, 5),), 9, WORDS))
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "prompt": WORDS.tokens((Piece(Source.UNIQUE, 1, 5),)).tolist(),
    }


def test_the_body_of_a_chat_has_words() -> None:
    chat = Shape("/v1/chat/completions", chat=True, as_text=False, fields={"max_tokens": 2})
    body = json.loads(chat.body((Piece(Source.UNIQUE, 1, 5),), 9, WORDS))
    assert body["max_tokens"] == 2
    assert [m["role"] for m in body["messages"]] == ["user"]
    assert len(body["messages"][0]["content"].split()) == 5


def test_a_whole_stream() -> None:
    outcome = answer(lambda _: httpx.Response(200, content=stream(*GOOD)))
    assert outcome.error == ""
    assert (outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens) == (4, 3, 1)
    assert len(outcome.chunks) == 2
    assert 0 < outcome.sent <= outcome.first == outcome.chunks[0] <= outcome.chunks[1] == outcome.last
    assert outcome.tokens_by_chunk == []


def test_chunks_without_text_do_not_count_but_the_end_does() -> None:
    outcome = Outcome(0)
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "a"}, {}]
    for now, delta in enumerate(deltas, 1):
        reason = "stop" if now == 4 else None
        outcome.take({"choices": [{"delta": delta, "finish_reason": reason}]}, now)
    assert (outcome.chunks, outcome.last) == ([2, 3], 4)


def test_usage_with_every_chunk_tells_its_tokens() -> None:
    outcome = Outcome(0)
    for now, (text, tokens) in enumerate([("a", 1), ("", 2), ("b", 4)]):
        usage = {"prompt_tokens": 5, "completion_tokens": tokens}
        outcome.take({"choices": [{"text": text}], "usage": usage}, now)
    assert (outcome.chunks, outcome.tokens_by_chunk) == ([0, 2], [1, 4])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "HTTP 400: too long"),
        (httpx.Response(503, text="busy"), "HTTP 503: busy"),
        (httpx.Response(200, content=stream(*GOOD, done=False)), r"the stream ended without \[DONE\]"),
        (httpx.Response(200, content=stream(*GOOD[:3])), "no usage in the stream"),
        (httpx.Response(200, content=stream({"error": {"message": "out of pages"}})), "in the stream: out of pages"),
        (httpx.Response(200, content=stream({"object": "error", "message": "oh"})), "in the stream: oh"),
        (httpx.Response(200, content=b"data: {\n\n"), "the stream is not as expected: JSONDecodeError"),
        (httpx.Response(200, content=stream(*GOOD[:2], {"choices": [{"finish_reason": "abort"}]})), "reason abort"),
        (
            httpx.Response(200, content=stream({"choices": [], "usage": {**USAGE, "completion_tokens": 0}})),
            "no tokens came",
        ),
    ],
)
def test_failures_have_reasons(reply: httpx.Response, reason: str) -> None:
    outcome = answer(lambda _: reply)
    assert re.search(reason, outcome.error)
    assert outcome.last >= outcome.sent


def test_a_server_that_is_gone() -> None:
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert answer(gone).error == "ConnectError: refused"


def test_a_request_has_a_limit() -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    assert answer(never, timeout_s=0.01).error == "no answer within 0.01 s (--request-timeout)"


@pytest.mark.parametrize(
    ("body", "said"),
    [(b'{"error": {"message": "a"}}', "a"), (b'{"detail": "b"}', "b"), (b"<html>", "<html>"), (b"[1]", "[1]")],
)
def test_the_reason_of_a_refusal(body: bytes, said: str) -> None:
    assert refusal(body) == said


class Fake:
    """A server that answers after it was asked to; counts what is in flight."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lengths: list[int] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.lengths.append(len(json.loads(request.content)["prompt"]))
        self.now += 1
        self.most = max(self.most, self.now)
        return httpx.Response(200, content=self._answer())

    async def _answer(self) -> AsyncIterator[bytes]:
        for _ in range(20):
            await asyncio.sleep(0)
        self.now -= 1
        yield stream(*GOOD)


def load(fake: Fake, starts: list[float] | None, most: int | None) -> tuple[list[Outcome], int]:
    """Outcomes of 12 requests, and how many were told as ended."""

    async def ask() -> tuple[list[Outcome], int]:
        ended: list[Outcome] = []
        async with httpx.AsyncClient(transport=httpx.MockTransport(fake), base_url="http://test") as http:
            client = Client(http, SHAPE.path, 60)
            outcomes = await run(client, SHAPE, WORDS, random_requests(12, 30, 3, 0.5, 0), starts, most, ended.append)
        return outcomes, len(ended)

    return asyncio.run(ask())


@pytest.mark.parametrize("most", [1, 3])
def test_at_most_so_many_at_a_time(most: int) -> None:
    fake = Fake()
    outcomes, ended = load(fake, None, most)
    assert (fake.most, ended) == (most, 12)
    assert [o.error for o in outcomes] == [""] * 12
    assert fake.lengths == [o.asked_input for o in outcomes]


def test_a_schedule_is_kept_while_requests_wait_for_places() -> None:
    starts = [0.001 * i for i in range(12)]
    outcomes, _ = load(Fake(), starts, 1)
    assert [o.scheduled for o in outcomes] == starts
    assert all(o.sent >= o.scheduled for o in outcomes)
    assert all(b.sent >= a.last for a, b in pairwise(outcomes))


def test_all_at_once() -> None:
    fake = Fake()
    outcomes, _ = load(fake, [0.0] * 12, None)
    assert fake.most > 1
    assert {o.scheduled for o in outcomes} == {0}
