"""A plan that leaves before the result of the one before it changes no text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .server import Server

STORY = "Once upon a time, in a small village by the sea, there lived"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": STORY, "temperature": 0, "ignore_eos": True},
    "seeded": {"prompt": STORY, "seed": 11, "ignore_eos": True},
    "several": {"prompt": STORY, "seed": 12, "n": 3, "top_k": 50, "ignore_eos": True},
    "penalties": {"prompt": STORY, "temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 1},
    "min_tokens": {"prompt": STORY, "seed": 13, "stop": ["a", "e"], "min_tokens": 5},
    "stop": {"prompt": STORY, "temperature": 0, "stop": [" a "]},
    "end": {"messages": QUESTION, "temperature": 0},
    "one": {"prompt": STORY, "temperature": 0, "max_tokens": 1},
    "none": {"prompt": STORY, "max_tokens": 0, "echo": True, "logprobs": 0},
    "scored": {"prompt": STORY, "temperature": 0, "echo": True, "logprobs": 2},
}


@pytest.fixture(scope="module")
def in_turn() -> Iterator[Server]:
    """Each plan waits for the result of the one before it."""
    with Server("--dtype", "float32", "--kv-cache-tokens", "8192", "--disable-overlap-schedule") as running:
        yield running.wait_ready()


def answers(server: Server) -> dict[str, Any]:
    """All requests at once."""

    def ask(body: dict[str, Any]) -> Any:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = server.post(path, {"max_tokens": 16, **body})
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return dict(zip(ASKED, pool.map(ask, ASKED.values()), strict=True))


def shown(answer: dict[str, Any]) -> list[Any]:
    """What a client sees of each choice but for log probabilities."""
    return [
        (choice.get("text", choice.get("message")), choice["finish_reason"], (choice["logprobs"] or {}).get("tokens"))
        for choice in answer["choices"]
    ]


def test_same_texts(solo: Server, in_turn: Server) -> None:
    ahead, turn = answers(solo), answers(in_turn)
    for name in ASKED:
        assert shown(ahead[name]) == shown(turn[name]), name
        counts = [one[name]["usage"]["completion_tokens"] for one in (ahead, turn)]
        assert counts[0] == counts[1], name
    assert ahead["end"]["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert (ahead["stop"]["choices"][0]["finish_reason"], ahead["end"]["usage"]["completion_tokens"]) == ("stop", 8)
    for place in ("none", "scored"):
        logprobs = [one[place]["choices"][0]["logprobs"]["token_logprobs"][1:] for one in (ahead, turn)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_token_for_token(solo: Server, in_turn: Server) -> None:
    """The token behind the end, which was computed for nothing, appears nowhere."""
    free = solo.generate(STORY, max_new_tokens=12, ignore_eos=True)
    for end in free["output_ids"][2:10:3]:
        pair = [one.generate(STORY, max_new_tokens=12, stop_token_ids=[end]) for one in (solo, in_turn)]
        expected = free["output_ids"][: free["output_ids"].index(end) + 1]
        for answer in pair:
            assert answer["output_ids"] == expected
            assert answer["meta_info"]["completion_tokens"] == len(expected)
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    for one in (solo, in_turn):
        pages = one.settle()["pages"]
        assert (pages["in_use"], pages["free"] + pages["evictable"]) == (0, pages["total"])
