"""The HTTP application: routes, errors, auth."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import dcprt
from dcprt.errors import DcprtError
from dcprt.server import control, generate, openai
from dcprt.server.http import BearerAuth, ClientGone, on_error, on_gone, on_http, on_invalid
from dcprt.server.service import Service


def build_app(service: Service, api_key: str | None) -> FastAPI:
    """The application around `service`, which may still be without a model."""
    app = FastAPI(title="dcprt", version=dcprt.__version__)
    app.include_router(openai.router(service))
    app.include_router(generate.router(service))
    app.include_router(control.router(service))
    app.add_exception_handler(DcprtError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientGone, on_gone)
    if api_key is not None:
        app.add_middleware(BearerAuth, key=api_key)

    return app
