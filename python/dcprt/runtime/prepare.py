"""From a user's choices to a deployment: finds the checkpoint, reads its shape, and refuses what cannot work."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from dcprt import env
from dcprt.comm.groups import default_backend
from dcprt.config import Config
from dcprt.errors import ConfigError
from dcprt.planner import host
from dcprt.planner.capacity import context_len, plan_capacity, resolve_dtype
from dcprt.planner.deployment import Deployment
from dcprt.weights.hf_config import read_spec
from dcprt.weights.resolve import model_name, resolve


def prepare(config: Config, progress: Callable[[str], None]) -> Deployment:
    """Decide everything that does not need a weight; `progress` hears of steps that take time.

    Raises:
        ModelError: the checkpoint is missing, damaged or not supported.
        ConfigError: grid, context, KV cache or an environment variable cannot work; names what would.
    """
    env.check()
    _check_profile(config.server.profile_steps)
    if env.replicate_q():
        config = dataclasses.replace(config, grid=dataclasses.replace(config.grid, dcp_replicate_q=True))
    directory = resolve(config.model.model, config.model.load_format, progress)
    spec = read_spec(directory)
    capacity = plan_capacity(config, spec)
    return Deployment(
        config=config,
        model_name=config.model.served_model_name or model_name(config.model.model),
        directory=str(directory),
        spec=spec,
        dtype=resolve_dtype(config),
        context_len=context_len(config, spec),
        layout=capacity.layout,
        num_pages=capacity.num_pages,
        comm=default_backend(),
        threads=max(host.cores() // config.grid.ranks, 1),
        chat_template=_read_template(config.model.chat_template),
    )


def _check_profile(path: str | None) -> None:
    """Raises ConfigError: no file can be written there."""
    if path is None:
        return
    directory = Path(path).absolute().parent
    if not directory.is_dir() or not os.access(directory, os.W_OK) or Path(path).is_dir():
        raise ConfigError(f"--profile-steps cannot write {path}: it has to be a file in a directory that is writable.")


def _read_template(path: str | None) -> str | None:
    """Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"Cannot read the chat template {path}: {reason}.") from error
