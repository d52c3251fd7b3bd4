"""Attention backends by name."""

from __future__ import annotations

from dcprt.attention.backend import AttentionBackend
from dcprt.errors import ConfigError
from dcprt.planner import host


def available() -> list[str]:
    """Names that `make_backend` knows here, the fastest last."""
    return ["torch", "native"] if host.has_kernels() else ["torch"]


def make_backend(name: str = "") -> AttentionBackend:
    """The backend of that name; empty means the fastest there is.

    Raises:
        ConfigError: there is no such backend, or it is not installed.
    """
    name = name or available()[-1]
    if name not in available():
        raise ConfigError(f"DCPRT_ATTENTION is {name!r}; here it can be {' or '.join(available())}")
    if name == "native":
        from dcprt.attention.native_backend import NativeBackend

        return NativeBackend()
    from dcprt.attention.torch_backend import TorchBackend

    return TorchBackend()
