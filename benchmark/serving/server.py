"""What a server tells of itself: its model, how long a request may be, its prefix cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx

from serving.client import refusal

COUNTERS = re.compile(r'^dcprt_tokens_total\{kind="(prompt|cached)"\} (\S+)', re.M)


class ServerError(Exception):
    """A server that cannot be measured; the text is for the user."""


@dataclass(frozen=True)
class Served:
    """The model under test."""

    model: str
    is_dcprt: bool
    max_len: int | None
    """Prompt and output tokens of one request, where the server tells."""
    vocab_size: int | None


@dataclass(frozen=True)
class CacheCount:
    """Tokens that went through a dcprt server since its start."""

    prompt: float
    cached: float


async def discover(http: httpx.AsyncClient, model: str | None) -> Served:
    """The model of that name, or the only one.

    Raises:
        ServerError: no answer, or several models and no name.
    """
    cards = (await _json(http, "/v1/models"))["data"]
    names = [card["id"] for card in cards]
    if model is None and len(names) != 1:
        raise ServerError(f"The server has {len(names)} models; --model chooses one of: {', '.join(names)}")
    card = cards[names.index(model)] if model in names else cards[0] if len(cards) == 1 else {}
    size = card.get("vocab_size")
    return Served(model or names[0], card.get("owned_by") == "dcprt", card.get("max_model_len"), size)


async def cache_count(http: httpx.AsyncClient) -> CacheCount:
    """Counters of a dcprt server.

    Raises:
        ServerError: there are none.
    """
    found = dict(COUNTERS.findall((await _get(http, "/metrics")).text))
    if len(found) != 2:
        raise ServerError("/metrics has no dcprt_tokens_total")
    return CacheCount(float(found["prompt"]), float(found["cached"]))


def hit_rate(before: CacheCount, after: CacheCount) -> float:
    """Cached tokens per prompt token between two readings."""
    return (after.cached - before.cached) / max(after.prompt - before.prompt, 1)


async def flush(http: httpx.AsyncClient) -> None:
    """Empty the prefix cache.

    Raises:
        ServerError: it cannot be done.
    """
    try:
        response = await http.post("/flush_cache")
    except httpx.HTTPError as error:
        raise ServerError(f"POST /flush_cache: {type(error).__name__}: {error}") from None
    if response.status_code != 200:
        raise ServerError(f"POST /flush_cache: HTTP {response.status_code}: {refusal(response.content)}")


async def _get(http: httpx.AsyncClient, path: str) -> httpx.Response:
    try:
        response = await http.get(path)
    except httpx.HTTPError as error:
        raise ServerError(f"GET {http.base_url.join(path)}: {type(error).__name__}: {error}") from None
    if response.status_code != 200:
        raise ServerError(f"GET {path}: HTTP {response.status_code}: {refusal(response.content)}")
    return response


async def _json(http: httpx.AsyncClient, path: str) -> Any:
    response = await _get(http, path)
    try:
        return response.json()
    except ValueError:
        raise ServerError(f"GET {path}: no JSON: {response.text[:100]}") from None
