"""dcprt: an LLM serving runtime that shards every request's KV cache along the sequence (DCP).

    from dcprt import Engine, SamplingParams

Names are imported when they are first used, so that a child process pays only for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "dcprt.engine",
    "Output": "dcprt.engine",
    "Usage": "dcprt.messages",
    "SamplingParams": "dcprt.params",
    "Config": "dcprt.config",
    "DcprtError": "dcprt.errors",
    "ConfigError": "dcprt.errors",
    "GridError": "dcprt.errors",
    "ModelError": "dcprt.errors",
    "RequestError": "dcprt.errors",
    "RuntimeFailed": "dcprt.errors",
}

__all__ = [
    "Config",
    "ConfigError",
    "DcprtError",
    "Engine",
    "GridError",
    "ModelError",
    "Output",
    "RequestError",
    "RuntimeFailed",
    "SamplingParams",
    "Usage",
    "__version__",
]

if TYPE_CHECKING:
    from dcprt.config import Config
    from dcprt.engine import Engine, Output
    from dcprt.errors import ConfigError, DcprtError, GridError, ModelError, RequestError, RuntimeFailed
    from dcprt.messages import Usage
    from dcprt.params import SamplingParams


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dcprt' has no attribute {name!r}")
