"""The environment variables dcprt reads, in one place. `DCPRT_KERNEL_ISA` is the kernels' own."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from dcprt.errors import ConfigError, did_you_mean

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def cache_dir() -> Path:
    """Where converted checkpoints live: `$DCPRT_CACHE_DIR`, else `$XDG_CACHE_HOME/dcprt`, else `~/.cache/dcprt`."""
    if chosen := os.environ.get("DCPRT_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dcprt"


def collective_timeout_s() -> float:
    """Deadline of one collective in seconds: `$DCPRT_COLLECTIVE_TIMEOUT`, default 60.

    Raises:
        ConfigError: it is no positive number.
    """
    text = os.environ.get("DCPRT_COLLECTIVE_TIMEOUT", "") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"DCPRT_COLLECTIVE_TIMEOUT is {text!r}; it takes a number of seconds above 0.")
    return seconds


def replicate_q() -> bool:
    """`$DCPRT_DCP_Q_REPLICATE=1` stands for `--dcp-replicate-q`.

    Raises:
        ConfigError: it is neither yes nor no.
    """
    text = os.environ.get("DCPRT_DCP_Q_REPLICATE", "")
    if text.lower() not in (*_YES, *_NO):
        raise ConfigError(f"DCPRT_DCP_Q_REPLICATE is {text!r}; it takes 1 or 0.")
    return text.lower() in _YES


def comm_backend() -> str:
    """`$DCPRT_COMM` forces `shm` or `gloo`; empty means: `shm` where its kernels are installed.

    Raises:
        ConfigError: it is none of them.
    """
    return _one_of("DCPRT_COMM", ("shm", "gloo"))


def attention_backend() -> str:
    """`$DCPRT_ATTENTION` forces `torch` or `native`; empty means: `native` where its kernels are installed.

    Raises:
        ConfigError: it is none of them.
    """
    return _one_of("DCPRT_ATTENTION", ("torch", "native"))


def check() -> None:
    """Read all of them, so that a wrong one is told before a process starts.

    Raises:
        ConfigError: names the variable, its value, and what it takes.
    """
    cache_dir()
    collective_timeout_s()
    replicate_q()
    comm_backend()
    attention_backend()


def _one_of(name: str, known: Sequence[str]) -> str:
    value = os.environ.get(name, "")
    if value and value not in known:
        raise ConfigError(f"{name} is {value!r}; it takes {' or '.join(known)}.{did_you_mean(value, known)}")
    return value
