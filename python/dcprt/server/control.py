"""Everything beside generation: health, state, metrics, aborting, the cache, and the tokenizer by itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

import dcprt
from dcprt.errors import RequestError
from dcprt.params import SamplingParams
from dcprt.server.http import json_response, while_connected
from dcprt.server.protocol import AbortBody, DetokenizeBody, TokenizeBody
from dcprt.server.service import Service, new_id, text_request


def router(service: Service) -> APIRouter:
    """`/health`, `/server_info`, `/metrics` and the rest."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @routes.get("/health_generate")
    async def health_generate(http: Request) -> Response:
        """Healthy if a token comes out."""
        request = text_request(new_id("health"), [0], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        await while_connected(http.receive, service.collect([request]))
        return Response(status_code=200)

    @routes.get("/server_info")
    async def server_info() -> Response:
        deployment = service.get().deployment
        state = await service.get().query("info")
        return json_response(
            {
                "version": dcprt.__version__,
                "model": deployment.model_name,
                "dtype": deployment.dtype,
                "context_len": deployment.context_len,
                "comm": deployment.comm,
                **state,
            }
        )

    @routes.get("/metrics")
    async def metrics() -> Response:
        body = await service.get().query("metrics")
        return Response(body["text"], media_type="text/plain; version=0.0.4")

    @routes.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        return json_response({"aborted": service.abort_all() if body.abort_all else service.abort(body.rid)})

    @routes.post("/flush_cache")
    async def flush_cache() -> Response:
        return json_response(await service.get().query("flush_cache"))

    _add_tokenizer(routes, service)
    return routes


def _add_tokenizer(routes: APIRouter, service: Service) -> None:
    """`/tokenize` and `/detokenize`."""

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give exactly one of prompt and messages.", param="prompt")
        question: dict[str, Any] = {"text": body.prompt, "add_special_tokens": body.add_special_tokens}
        if body.messages is not None:
            question = {"chat": [message.for_template() for message in body.messages]}
        tokens = (await service.get().query("tokenize", question))["tokens"]
        max_len = min(service.get().deployment.context_len, service.get().deployment.capacity_tokens)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": max_len})

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        question = {"tokens": body.tokens, "skip_special_tokens": body.skip_special_tokens}
        return json_response({"prompt": (await service.get().query("detokenize", question))["text"]})
