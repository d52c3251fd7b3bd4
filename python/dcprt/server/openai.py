"""OpenAI's completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from dcprt.messages import TextRequest, Usage
from dcprt.params import SamplingParams
from dcprt.runtime.runtime import Stream
from dcprt.server.http import DONE, EventStream, event, json_response, while_connected
from dcprt.server.protocol import ChatBody, CompletionBody, OpenAIBody, check_choices
from dcprt.server.service import Choice, Service, new_id, nth_choice, text_request
from dcprt.server.shapes import ChatShape, CompletionShape, Shape

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat fills the context."""


def usage_body(usages: Sequence[Usage], choices_per_prompt: int) -> dict[str, Any]:
    """OpenAI's `usage` over all choices; a prompt counts once, however many choices it has."""
    firsts = usages[::choices_per_prompt]
    prompt = sum(u.prompt_tokens for u in firsts)
    completion = sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in firsts)},
    }


class Answer:
    """One HTTP answer: its head, its shape, and the requests behind its choices."""

    def __init__(self, service: Service, shape: Shape, body: OpenAIBody) -> None:
        self._service = service
        self._shape = shape
        self._body = body
        self._head = {
            "id": new_id(shape.id_prefix),
            "created": int(time.time()),
            "model": service.get().deployment.model_name,
        }

    @property
    def id(self) -> str:
        return str(self._head["id"])

    async def respond(self, http: Request, prompts: Sequence[TextRequest]) -> Response:
        """Answer `n` choices to each of `prompts`, at once or as a stream."""
        requests = self._choices(prompts)
        if not self._body.stream:
            choices = await while_connected(http.receive, self._service.collect(requests, self.id))
            return json_response(self._whole(choices))
        streams = await while_connected(http.receive, self._service.start(requests, self.id))
        return EventStream(self._chunks(streams), lambda: self._service.close(streams))

    def _choices(self, prompts: Sequence[TextRequest]) -> list[TextRequest]:
        """`n` requests a prompt, each with a seed of its own, the first with the one given."""
        check_choices(len(prompts), self._body.choices)
        requests: list[TextRequest] = []
        for prompt in prompts:
            for i in range(self._body.choices):
                sampling = nth_choice(prompt.sampling, i)
                rid = f"{self.id}-{len(requests)}" if len(prompts) * self._body.choices > 1 else self.id
                requests.append(msgspec.structs.replace(prompt, rid=rid, sampling=sampling))
        return requests

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return usage_body([choice.usage for choice in choices], self._body.choices)

    def _whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._shape.object,
            "choices": [{"index": i, **self._shape.whole(choice)} for i, choice in enumerate(choices)],
            "usage": self._usage(choices),
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """Where the client wants the usage, every chunk has one, null but for the last."""
        body = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        return event({**body, "usage": usage} if self._body.wants_usage else body)

    async def _chunks(self, streams: list[Stream]) -> AsyncIterator[bytes]:
        """The whole stream, up to `[DONE]`."""
        choices = [Choice.of(stream) for stream in streams]
        if opening := self._shape.opening():
            for index in range(len(streams)):
                yield self._chunk([{"index": index, **opening}])
        async for index, item in self._service.events(streams):
            if item.text or item.prompt_text or item.finish or item.logprobs:
                yield self._chunk([{"index": index, **self._shape.piece(item, choices[index])}])
            choices[index].add(item)
        if self._body.wants_usage:
            yield self._chunk([], self._usage(choices))
        yield DONE


def _with(body: OpenAIBody, request: TextRequest) -> TextRequest:
    return msgspec.structs.replace(request, cache_salt=body.cache_salt or "", timeout_s=body.timeout)


def router(service: Service) -> APIRouter:
    """`/v1/...`."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> Response:
        deployment = service.get().deployment
        model = {
            "id": deployment.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "dcprt",
            "max_model_len": min(deployment.context_len, deployment.capacity_tokens),
        }
        return json_response({"object": "list", "data": [model]})

    @routes.post("/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        service.check_model(body.model)
        limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit, body.logprobs, body.logprobs if body.echo else None)
        answer = Answer(service, CompletionShape(logprobs=body.logprobs is not None), body)
        return await answer.respond(http, [_completion(body, prompt, sampling) for prompt in body.prompts()])

    @routes.post("/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        service.check_model(body.model)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        sampling = body.sampling(limit, body.wanted_logprobs())
        messages = [message.for_template() for message in body.messages]
        request = TextRequest(rid="", chat=messages, sampling=sampling)
        answer = Answer(service, ChatShape(logprobs=bool(body.logprobs)), body)
        return await answer.respond(http, [_with(body, request)])

    return routes


def _completion(body: CompletionBody, prompt: str | list[int], sampling: SamplingParams) -> TextRequest:
    return msgspec.structs.replace(_with(body, text_request("", prompt, sampling)), echo=body.echo)
