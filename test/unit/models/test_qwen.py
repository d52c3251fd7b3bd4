"""Qwen2, Qwen3 and Qwen3-MoE checkpoints as transformers writes them, and Mistral's, which are Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from .checkpoints import GRIDS, SHAPE, assert_family, write

EXPERTS = {"head_dim": 8, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "qwen3-biased": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 10, "attention_bias": True}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 8, "sliding_window": None}),
}
QUICK = [
    ("qwen2", (2, 2), 64, False),
    ("qwen2-tied", (4, 4), 2048, False),
    ("qwen3", (3, 3), 2048, False),
    ("qwen3-biased", (4, 2), 64, False),
    ("qwen3-moe", (4, 2), 64, True),
    ("qwen3-moe", (3, 3), 64, False),
    ("qwen3-moe-mixed", (2, 2), 2048, True),
    ("mistral", (1, 1), 64, False),
]


def check(kind: str, grid: tuple[int, int], chunk: int, ep: bool, tmp_path: Path) -> None:
    model_class, config_class, changes = KINDS[kind]
    model = write(tmp_path, model_class, config_class(**{**SHAPE, **changes}))
    assert_family(tmp_path, model, grid, chunk=chunk, ep=ep)


@pytest.mark.parametrize(("kind", "grid", "chunk", "ep"), QUICK, ids=str)
def test_agrees(kind: str, grid: tuple[int, int], chunk: int, ep: bool, tmp_path: Path) -> None:
    check(kind, grid, chunk, ep, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_everywhere(kind: str, grid: tuple[int, int], chunk: int, tmp_path: Path) -> None:
    check(kind, grid, chunk, chunk == 64, tmp_path)
