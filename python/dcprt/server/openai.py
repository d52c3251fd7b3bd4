"""OpenAI's completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dcprt.messages import Finish, TextRequest, Usage
from dcprt.runtime.runtime import Stream
from dcprt.server.http import DONE, EventStream, event, json_response, while_connected
from dcprt.server.protocol import ChatBody, CompletionBody
from dcprt.server.service import Choice, Service, new_id, text_request

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat fills the context."""


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """OpenAI's `usage`, summed over choices."""
    prompt = sum(u.prompt_tokens for u in usages)
    completion = sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
    }


def _reason(finish: Finish | None) -> str | None:
    return finish.reason if finish else None


class Answer:
    """The envelope of one answer, in the shape of completions or of chat."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._head = {"id": new_id("chatcmpl" if chat else "cmpl"), "created": int(time.time()), "model": model}

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [
                {**self._content(choice.text), "index": i, "logprobs": None, "finish_reason": _reason(choice.finish)}
                for i, choice in enumerate(choices)
            ],
            "usage": usage_body([choice.usage for choice in choices]),
        }

    def delta(self, index: int, text: str, finish: Finish | None, *, first: bool = False) -> dict[str, Any]:
        """One choice of a chunk; the first of a chat tells the role."""
        role = {"role": "assistant"} if first else {}
        content: dict[str, Any] = {"delta": {**role, "content": text}} if self._chat else {"text": text}
        if self._chat and finish and not text:
            content = {"delta": {}}
        return {**content, "index": index, "logprobs": None, "finish_reason": _reason(finish)}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, counted: bool) -> bytes:
        """A chunk of a stream. With `counted`, every chunk has a usage, null but for the last."""
        body = {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }
        return event({**body, "usage": usage} if counted else body)

    async def chunks(self, service: Service, streams: Sequence[Stream], *, counted: bool) -> AsyncIterator[bytes]:
        """The whole stream, up to `[DONE]`."""
        usages = [Usage(prompt_tokens=s.prompt_len, completion_tokens=0, cached_tokens=0) for s in streams]
        if self._chat:
            for index in range(len(streams)):
                yield self.chunk([self.delta(index, "", None, first=True)], None, counted=counted)
        async for index, item in service.events(streams):
            usages[index] = item.usage
            if item.text or item.finish:
                yield self.chunk([self.delta(index, item.text, item.finish)], None, counted=counted)
        if counted:
            yield self.chunk([], usage_body(usages), counted=True)
        yield DONE

    def _content(self, text: str) -> dict[str, Any]:
        if self._chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}


async def _answer(
    service: Service, http: Request, body: ChatBody | CompletionBody, requests: list[TextRequest], answer: Answer
) -> Response:
    if not body.stream:
        choices = await while_connected(http.receive, service.collect(requests))
        return json_response(answer.whole(choices))
    streams = await while_connected(http.receive, service.start(requests))
    return EventStream(answer.chunks(service, streams, counted=body.wants_usage))


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
        answer = Answer(service.get().deployment.model_name, chat=False)
        sampling = body.sampling(COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
        prompts = body.prompts()
        requests = [
            text_request(answer.id if len(prompts) == 1 else f"{answer.id}-{i}", prompt, sampling, body.cache_salt)
            for i, prompt in enumerate(prompts)
        ]
        return await _answer(service, http, body, requests, answer)

    @routes.post("/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        service.check_model(body.model)
        answer = Answer(service.get().deployment.model_name, chat=True)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        request = TextRequest(
            rid=answer.id,
            chat=[message.for_template() for message in body.messages],
            sampling=body.sampling(limit),
            cache_salt=body.cache_salt or "",
        )
        return await _answer(service, http, body, [request], answer)

    return routes
