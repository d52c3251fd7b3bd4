"""HTTP manners: JSON, server-sent events, errors in OpenAI's shape, bearer tokens, clients that go away."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from dcprt.errors import DcprtError, RequestError, RuntimeFailed

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def error_body(error: DcprtError) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {
        "error": {
            "message": str(error),
            "type": "server_error" if error_status(error) >= 500 else "invalid_request_error",
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, RequestError) else None,
        }
    }


def error_status(error: DcprtError) -> int:
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, RuntimeFailed) else 500


async def on_error(_: Request, error: Exception) -> Response:
    """A `DcprtError` as an answer."""
    assert isinstance(error, DcprtError)
    status = error_status(error)
    return json_response(error_body(error), status, {"Retry-After": "1"} if status == 503 else None)


async def on_invalid(_: Request, error: Exception) -> Response:
    """The first field that is missing or of a wrong type."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = path[0] if path and not path[0].isdigit() else None
    where = f"{'.'.join(path)}: " if param else ""
    return json_response(error_body(RequestError(f"{where}{first['msg']}", param=param)), 400)


async def on_http(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: an unknown path, a wrong method, a body that is no text."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers) if error.headers else None
    return json_response(error_body(RequestError(text)), error.status_code, headers)


async def on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for waiter in (task, gone):
            waiter.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from an iterator, which is cancelled as soon as the client is gone.

    `close` is called in the end, even if the client went before the iterator was ever started.
    An error after the start is the last event, since the status has been sent.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            await while_connected(receive, self._pump(send))
        except ClientGone:
            return
        finally:
            self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except DcprtError as error:
            await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class BearerAuth:
    """Refuses requests without the key, but for `/health`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = RequestError("A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key")
                await json_response(error_body(error), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
