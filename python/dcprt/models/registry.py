"""Checkpoint architectures and the modules that build them. Imported lazily, so that naming one needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dcprt.config import ModelSpec
from dcprt.errors import ModelError

if TYPE_CHECKING:
    from dcprt.models.base import Model, ModelShard
    from dcprt.weights.loader import Loader

ARCHITECTURES = {
    "LlamaForCausalLM": "dcprt.models.llama",
}


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Model:
    """The sharded model of `spec.architecture`, its weights read through `load`.

    Raises:
        ModelError: no module builds this architecture; names those that are served.
    """
    if spec.architecture not in ARCHITECTURES:
        raise ModelError(f"{spec.architecture} is not served; these are: {', '.join(ARCHITECTURES)}.")
    model: Model = importlib.import_module(ARCHITECTURES[spec.architecture]).build(spec, shard, load)
    return model
