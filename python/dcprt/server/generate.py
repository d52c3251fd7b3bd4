"""SGLang's native `/generate`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dcprt.errors import RequestError
from dcprt.messages import TextRequest
from dcprt.runtime.runtime import Stream
from dcprt.server.http import DONE, EventStream, event, json_response, while_connected
from dcprt.server.protocol import GenerateBody
from dcprt.server.service import Choice, Service, new_id, text_request


def _requests(body: GenerateBody) -> list[TextRequest]:
    """Raises RequestError."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give exactly one of text and input_ids.", param="text")
    prompts = body.prompts()
    if body.rid is None:
        rids = [new_id("gen") for _ in prompts]
    else:
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
    if len(rids) != len(prompts):
        raise RequestError(f"There are {len(prompts)} prompts and {len(rids)} rids.", param="rid")
    sampling = body.sampling_params.sampling()
    return [text_request(rid, p, sampling, body.cache_salt) for rid, p in zip(rids, prompts, strict=True)]


def _answer(rid: str, choice: Choice, start: float) -> dict[str, Any]:
    finish = choice.finish
    reason: dict[str, Any] | None = None
    if finish is not None:
        reason = {"type": finish.reason}
        if finish.matched is not None:
            reason["matched"] = finish.matched
        if finish.reason == "length":
            reason["length"] = choice.usage.completion_tokens
    return {
        "text": choice.text,
        "output_ids": choice.token_ids,
        "meta_info": {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": choice.usage.prompt_tokens,
            "completion_tokens": choice.usage.completion_tokens,
            "cached_tokens": choice.usage.cached_tokens,
            "e2e_latency": time.monotonic() - start,
        },
    }


async def _events(
    service: Service, streams: Sequence[Stream], start: float, *, batch: bool
) -> AsyncIterator[bytes]:
    """Each event has everything so far, as SGLang's has; those of a batch tell their index."""
    choices = [Choice(stream.prompt_len) for stream in streams]
    async for index, item in service.events(streams):
        choices[index].add(item)
        answer = _answer(streams[index].rid, choices[index], start)
        yield event({**answer, "index": index} if batch else answer)
    yield DONE


def router(service: Service) -> APIRouter:
    """`/generate`."""
    routes = APIRouter()

    @routes.post("/generate")
    async def generate(body: GenerateBody, http: Request) -> Response:
        start = time.monotonic()
        requests = _requests(body)
        if body.stream:
            streams = await while_connected(http.receive, service.start(requests))
            return EventStream(_events(service, streams, start, batch=body.is_batch))
        choices = await while_connected(http.receive, service.collect(requests))
        answers = [_answer(r.rid, choice, start) for r, choice in zip(requests, choices, strict=True)]
        return json_response(answers if body.is_batch else answers[0])

    return routes
