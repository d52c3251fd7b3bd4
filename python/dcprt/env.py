"""The environment variables dcprt reads, in one place."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted checkpoints live: `$DCPRT_CACHE_DIR`, else `$XDG_CACHE_HOME/dcprt`, else `~/.cache/dcprt`."""
    if chosen := os.environ.get("DCPRT_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dcprt"


def collective_timeout_s() -> float:
    """Deadline of one collective in seconds: `$DCPRT_COLLECTIVE_TIMEOUT`, default 60."""
    return float(os.environ.get("DCPRT_COLLECTIVE_TIMEOUT", "60"))


def replicate_q() -> bool:
    """`$DCPRT_DCP_Q_REPLICATE=1` stands for `--dcp-replicate-q`."""
    return os.environ.get("DCPRT_DCP_Q_REPLICATE", "") not in ("", "0")


def comm_backend() -> str:
    """`$DCPRT_COMM` forces `shm` or `gloo`; empty means: `shm` where its kernels are installed."""
    return os.environ.get("DCPRT_COMM", "")


def attention_backend() -> str:
    """`$DCPRT_ATTENTION` forces `torch` or `native`; empty means: `native` where its kernels are installed."""
    return os.environ.get("DCPRT_ATTENTION", "")
