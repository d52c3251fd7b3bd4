"""GLM-4.5 and 4.6 checkpoints as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from .checkpoints import GRIDS, SHAPE, assert_family, write

BASE: dict[str, Any] = {
    **SHAPE,
    "head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "routed_scaling_factor": 1.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "4.5-air": {"attention_bias": True},
    "4.6": {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 2, "n_shared_experts": 2},
    "groups": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
}
QUICK = [("4.5-air", (2, 2), 64, False), ("4.6", (4, 4), 2048, True), ("groups", (3, 3), 64, True)]


def check(kind: str, grid: tuple[int, int], chunk: int, ep: bool, tmp_path: Path) -> None:
    model = write(tmp_path, Glm4MoeForCausalLM, Glm4MoeConfig(**{**BASE, **KINDS[kind]}))
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


def test_layers_for_further_tokens_are_left(tmp_path: Path) -> None:
    """A published checkpoint has a whole layer behind the last, which is not loaded."""
    model = write(tmp_path, Glm4MoeForCausalLM, Glm4MoeConfig(**BASE))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors |= {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if "layers.2." in name}
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(36, 72)
    save_file(tensors, path, {"format": "pt"})
    assert_family(tmp_path, model, (2, 1), lengths=[30])
