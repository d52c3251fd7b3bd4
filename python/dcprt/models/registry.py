"""Checkpoint architectures and the classes that serve them. Imported lazily, so that naming one needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dcprt.config import ModelSpec
from dcprt.errors import ModelError

if TYPE_CHECKING:
    from dcprt.models.base import Model, ModelShard
    from dcprt.weights.loader import Loader

ARCHITECTURES = {
    "LlamaForCausalLM": "dcprt.models.llama:LlamaForCausalLM",
}


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Model:
    """The sharded model of `spec.architecture`, its weights read through `load`.

    Raises:
        ModelError: no class serves this architecture; names those that are served.
    """
    if spec.architecture not in ARCHITECTURES:
        raise ModelError(f"{spec.architecture} is not served; these are: {', '.join(ARCHITECTURES)}.")
    module, _, name = ARCHITECTURES[spec.architecture].partition(":")
    model: Model = getattr(importlib.import_module(module), name)(spec, shard, load)
    return model
