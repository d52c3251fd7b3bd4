"""SGLang's native `/generate`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from dcprt.errors import RequestError
from dcprt.messages import TextLogprob, TextRequest
from dcprt.runtime.runtime import Stream
from dcprt.server.http import DONE, EventStream, event, json_response, while_connected
from dcprt.server.protocol import GenerateBody, check_choices
from dcprt.server.service import Choice, Service, new_id, nth_choice, text_request


def _requests(body: GenerateBody) -> list[TextRequest]:
    """`n` requests a prompt. Raises RequestError."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Give exactly one of text and input_ids.", param="text")
    prompts, n = body.prompts(), body.sampling_params.n
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    if rids is None:
        rids = [new_id("gen") for _ in prompts]
    if len(rids) != len(prompts):
        raise RequestError(f"There are {len(prompts)} prompts and {len(rids)} rids.", param="rid")
    check_choices(len(prompts), n)
    sampling = body.sampling_params.sampling(*body.wanted_logprobs())
    requests = []
    for rid, prompt in zip(rids, prompts, strict=True):
        for i in range(n):
            request = text_request(rid if n == 1 else f"{rid}-{i}", prompt, nth_choice(sampling, i))
            requests.append(msgspec.structs.replace(request, cache_salt=body.cache_salt or "", timeout_s=body.timeout))
    return requests


def _scored(entries: Sequence[TextLogprob]) -> list[list[Any]]:
    """SGLang's triples: log probability, token id, text."""
    return [[entry.logprob, entry.token, entry.text] for entry in entries]


def _logprobs(choice: Choice, body: GenerateBody) -> dict[str, Any]:
    prompt = choice.prompt_logprobs[max(body.logprob_start_len, 0) :]
    return {
        "input_token_logprobs": _scored(prompt),
        "output_token_logprobs": _scored(choice.logprobs),
        "input_top_logprobs": [_scored(entry.top) for entry in prompt],
        "output_top_logprobs": [_scored(entry.top) for entry in choice.logprobs],
    }


def _answer(rid: str, choice: Choice, start: float, body: GenerateBody) -> dict[str, Any]:
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
            **(_logprobs(choice, body) if body.return_logprob else {}),
        },
    }


async def _events(service: Service, streams: list[Stream], start: float, body: GenerateBody) -> AsyncIterator[bytes]:
    """Each event has everything so far, as SGLang's has; those of a batch tell their index."""
    choices = [Choice.of(stream) for stream in streams]
    async for index, item in service.events(streams):
        choices[index].add(item)
        answer = _answer(streams[index].rid, choices[index], start, body)
        yield event({**answer, "index": index} if body.is_batch else answer)
    yield DONE


def router(service: Service) -> APIRouter:
    """`/generate`."""
    routes = APIRouter()

    @routes.post("/generate")
    async def generate(body: GenerateBody, http: Request) -> Response:
        start = time.monotonic()
        requests = _requests(body)
        group = body.rid if isinstance(body.rid, str) else ""
        if body.stream:
            streams = await while_connected(http.receive, service.start(requests, group))
            return EventStream(_events(service, streams, start, body), lambda: service.close(streams))
        choices = await while_connected(http.receive, service.collect(requests, group))
        answers = [_answer(r.rid, choice, start, body) for r, choice in zip(requests, choices, strict=True)]
        return json_response(answers if body.is_batch else answers[0])

    return routes
