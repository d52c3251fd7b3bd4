"""What a server tells of itself."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from serving.server import CacheCount, Served, ServerError, cache_count, discover, flush, hit_rate

CARD = {"id": "m", "owned_by": "dcprt", "max_model_len": 8192}


def served(cards: list[dict[str, Any]], model: str | None = None) -> Served:
    return ask(discover, httpx.Response(200, json={"data": cards}), model)


def ask(question: Any, reply: httpx.Response, *given: Any) -> Any:
    async def run() -> Any:
        transport = httpx.MockTransport(lambda _: reply)
        async with httpx.AsyncClient(transport=transport, base_url="http://test:1") as http:
            return await question(http, *given)

    return asyncio.run(run())


def test_the_only_model_is_meant() -> None:
    assert served([CARD]) == Served("m", True, 8192, None)
    assert served([{"id": "x", "vocab_size": 100}]) == Served("x", False, None, 100)


def test_of_several_one_is_named() -> None:
    cards = [CARD, {"id": "n", "owned_by": "vllm", "max_model_len": 5}]
    assert served(cards, "n") == Served("n", False, 5, None)
    with pytest.raises(ServerError, match="2 models; --model chooses one of: m, n"):
        served(cards)


def test_no_models_route() -> None:
    with pytest.raises(ServerError, match="GET /v1/models: HTTP 401: who"):
        ask(discover, httpx.Response(401, json={"error": {"message": "who?"}}), None)
    with pytest.raises(ServerError, match="no JSON"):
        ask(discover, httpx.Response(200, text="hello"), None)


def test_counters_of_the_cache() -> None:
    text = (
        "# TYPE dcprt_tokens_total counter\n"
        'dcprt_tokens_total{kind="prompt"} 1200.0\ndcprt_tokens_total{kind="cached"} 1e+02\n'
        'dcprt_tokens_total{kind="generated"} 7.0\n'
    )
    before = ask(cache_count, httpx.Response(200, text=text))
    assert before == CacheCount(1200, 100)
    assert hit_rate(before, CacheCount(1300, 150)) == 0.5
    assert hit_rate(before, before) == 0
    with pytest.raises(ServerError, match="dcprt_tokens_total"):
        ask(cache_count, httpx.Response(200, text="other 1"))


def test_a_cache_that_cannot_be_emptied() -> None:
    ask(flush, httpx.Response(200))
    with pytest.raises(ServerError, match="POST /flush_cache: HTTP 404: Not Found"):
        ask(flush, httpx.Response(404, json={"detail": "Not Found"}))
