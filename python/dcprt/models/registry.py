"""Model families: their checkpoint architectures, what reads their config.json, and the module that builds them.

A module is imported when it builds, so that naming one needs no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dcprt.errors import ModelError
from dcprt.spec import ModelSpec
from dcprt.weights import families
from dcprt.weights.config_fields import Fields

if TYPE_CHECKING:
    from dcprt.models.base import Model, ModelShard
    from dcprt.weights.checkpoint import TensorSource
    from dcprt.weights.loader import Loader


@dataclass(frozen=True)
class Architecture:
    """One name in the `architectures` of a config.json.

    `module` in `dcprt.models` offers `build(spec, shard, load)`. `read` finishes a `ModelSpec`. `model_type` stands for
    the architecture in a config.json without one. `nested` is the field that holds the language model's own fields.
    `renamed` maps beginnings of tensor names to those that the module asks for, the first that fits; tensors that
    match a pattern of `ignored` are no part of the model. `checkpoints` and `special` are for the documentation.
    """

    module: str
    read: Callable[[Fields, ModelSpec], ModelSpec]
    model_type: str
    checkpoints: str
    special: str
    nested: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


_KIMI_K25 = Architecture(
    "deepseek",
    families.deepseek_v3,
    "kimi_k25",
    "Kimi K2.5, K2.6 (unquantized)",
    "the text model alone, from the nested text_config",
    nested="text_config",
    renamed=(("language_model.model.blocks.", "model.layers."), ("language_model.", "")),
    ignored=("vision_tower.*", "mm_projector.*", "model.mm_projector.*"),
)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        "llama", families.llama, "llama", "Llama 2, 3, 3.x; SmolLM2", "rope scaling linear, llama3, YaRN"
    ),
    "MistralForCausalLM": Architecture(
        "llama", families.mistral, "mistral", "Mistral 7B v0.2 and later, Nemo, Small", "refused with a sliding window"
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen", families.qwen2, "qwen2", "Qwen2, Qwen2.5", "biases of query, key and value"
    ),
    "Qwen3ForCausalLM": Architecture("qwen", families.qwen3, "qwen3", "Qwen3", "query and key heads normalized"),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen", families.qwen3_moe, "qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B", "routed experts, softmax"
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek",
        families.deepseek_v2,
        "deepseek_v2",
        "DeepSeek-V2, V2-Lite",
        "MLA; experts by softmax in groups, shared experts, dense first layers",
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek",
        families.deepseek_v3,
        "deepseek_v3",
        "DeepSeek-V3, R1; Kimi K2",
        "MLA; experts by sigmoid and bias in groups, FP8 blocks",
    ),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,
    "Glm4MoeForCausalLM": Architecture(
        "glm",
        families.glm4_moe,
        "glm4_moe",
        "GLM-4.5, 4.6",
        "half of a head rotated; experts by sigmoid and bias, shared experts",
    ),
}

NOT_SERVED = {
    "DeepseekV32ForCausalLM": "sparse attention",
    "FalconH1ForCausalLM": "recurrent layers",
    "Gemma2ForCausalLM": "sliding windows",
    "Gemma3ForCausalLM": "sliding windows",
    "Gemma3ForConditionalGeneration": "sliding windows",
    "GptOssForCausalLM": "sliding windows and attention sinks",
    "JambaForCausalLM": "recurrent layers",
    "KimiLinearForCausalLM": "recurrent layers",
    "MambaForCausalLM": "recurrent layers",
    "Mamba2ForCausalLM": "recurrent layers",
    "MiniMaxText01ForCausalLM": "recurrent layers",
    "Qwen3NextForCausalLM": "recurrent layers",
}
"""Architectures that are refused for what they need."""


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Model:
    """The sharded model of `spec.architecture`, its weights read through `load`.

    Raises:
        ModelError: no module builds this architecture; names those that are served.
    """
    if spec.architecture not in ARCHITECTURES:
        raise ModelError(f"{spec.architecture} is not served; these are: {', '.join(ARCHITECTURES)}.")
    module = importlib.import_module(f"dcprt.models.{ARCHITECTURES[spec.architecture].module}")
    model: Model = module.build(spec, shard, load)
    return model


def open_checkpoint(directory: Path, spec: ModelSpec) -> TensorSource:
    """The tensors of `directory`, under the names that the module asks for, dequantized.

    Raises:
        ModelError: no files, or a damaged one.
    """
    from dcprt.weights.checkpoint import Checkpoint
    from dcprt.weights.views import BlockScaled, Renamed

    source: TensorSource = Checkpoint(directory, fp8=bool(spec.fp8_block))
    if spec.fp8_block:
        source = BlockScaled(source, spec.fp8_block)
    renamed = ARCHITECTURES[spec.architecture].renamed
    return Renamed(source, renamed) if renamed else source


def ignored(spec: ModelSpec) -> list[str]:
    """Patterns of tensors that a checkpoint may have and the model does not use."""
    patterns = ["*.rotary_emb.inv_freq", *ARCHITECTURES[spec.architecture].ignored]
    if spec.tie_embeddings:
        patterns.append("lm_head.weight")
    return patterns + [f"model.layers.{spec.num_layers + i}.*" for i in range(spec.mtp_layers)]


def rows() -> list[tuple[str, str, str, str]]:
    """Architecture, module, checkpoints and what is special of every row, for the documentation."""
    return [(name, f"models/{x.module}.py", x.checkpoints, x.special) for name, x in ARCHITECTURES.items()]
