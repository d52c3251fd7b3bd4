"""Checkpoints with routed experts: layouts, quantization, damage, grids with more ranks than experts or width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dcprt.errors import ModelError
from dcprt.weights.checkpoint import Checkpoint

from .checkpoints import GRIDS, SHAPE, TOLERANCE, assert_family, prompt_of, write
from .harness import Harness, relative_error

QWEN: dict[str, Any] = {
    **SHAPE,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}
DEEPSEEK: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 6,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
ROUTINGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "v2-greedy": (DeepseekV2ForCausalLM, DeepseekV2Config, {"routed_scaling_factor": 1.5}),
    "v2-groups": (DeepseekV2ForCausalLM, DeepseekV2Config, {"topk_method": "group_limited_greedy"}),
    "v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {}),
    "k2": (DeepseekV3ForCausalLM, DeepseekV3Config, {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}),
}


def write_qwen(directory: Path, **changes: Any) -> Any:
    return write(directory, Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**QWEN, **changes}))


def change_tensors(directory: Path, change: Any) -> None:
    """Rewrite the checkpoint's tensors by `change(dict)`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def fuse(tensors: dict[str, Tensor]) -> None:
    """From a tensor per expert to one for all, as transformers holds them in memory."""
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts"
        single = [[tensors.pop(f"{name}.{i}.{x}_proj.weight") for x in ("gate", "up", "down")] for i in range(4)]
        tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in single])
        tensors[f"{name}.down_proj"] = torch.stack([down for _, _, down in single])


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("grid", [(1, 1), (5, 1), (7, 7)], ids=str)
def test_fused_layout_and_more_ranks_than_experts(grid: tuple[int, int], ep: bool, tmp_path: Path) -> None:
    """Four experts of width 6 on seven ranks."""
    model = write_qwen(tmp_path)
    assert_family(tmp_path, model, grid, lengths=[1, 70], ep=ep)
    change_tensors(tmp_path, fuse)
    assert_family(tmp_path, model, grid, lengths=[1, 70], ep=ep)


@pytest.mark.parametrize("ep", [False, True])
def test_one_expert(ep: bool, tmp_path: Path) -> None:
    model = write_qwen(tmp_path, num_experts=1, num_experts_per_tok=1)
    assert_family(tmp_path, model, (3, 1), lengths=[1, 40], ep=ep)


@pytest.mark.parametrize("ep", [False, True])
def test_damage_is_named(ep: bool, tmp_path: Path) -> None:
    """Also where the rank that notices would not hold the expert."""
    write_qwen(tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    whole = load_file(tmp_path / "model.safetensors")
    for change, words in (
        (lambda tensors: tensors.pop(name), rf"no tensor {name} with shape \(6, 36\)"),
        (lambda tensors: tensors.update({name: torch.ones(7, 36)}), r"\(7, 36\).*\(6, 36\)"),
        (lambda tensors: tensors.update({name.replace("3", "4"): torch.ones(6, 36)}), "does not use: .*experts.4"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"), r"mlp\.gate\.weight"),
    ):
        save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
        change_tensors(tmp_path, change)
        with pytest.raises(ModelError, match=words):
            Harness(tmp_path, tp=2, ep=ep)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_each_rank_reads_its_part_only(ep: bool, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks together read every element of the experts once."""
    write_qwen(tmp_path)
    if fused:
        change_tensors(tmp_path, fuse)
    read, sizes = Checkpoint.read, []

    def note(source: Checkpoint, name: str, *slices: Any) -> Tensor:
        part = read(source, name, *slices)
        if ".experts." in name:
            sizes.append(part.numel())
        return part

    monkeypatch.setattr(Checkpoint, "read", note)
    with Harness(tmp_path, tp=3, ep=ep):
        pass
    assert sum(sizes) == 3 * 4 * 3 * 6 * 36


def test_dummy_weights_are_the_same_on_every_grid(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    results = []
    for options in ({}, {"tp": 4, "dcp": 2}, {"tp": 3, "ep": True}):
        with Harness(tmp_path, load_format="dummy", **options) as harness:
            results.append(harness.greedy(prompt_of(20), 5)[1])
    assert all(relative_error(result, results[0]) <= TOLERANCE for result in results)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("grid", "ep"), [((2, 2), False), ((3, 3), True)], ids=str)
def test_routing_of_deepseek(kind: str, grid: tuple[int, int], ep: bool, tmp_path: Path) -> None:
    model_class, config_class, changes = ROUTINGS[kind]
    model = write(tmp_path, model_class, config_class(**{**DEEPSEEK, **changes}))
    assert_family(tmp_path, model, grid, lengths=[1, 65, 200], ep=ep)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routing_of_deepseek_everywhere(kind: str, grid: tuple[int, int], chunk: int, tmp_path: Path) -> None:
    model_class, config_class, changes = ROUTINGS[kind]
    model = write(tmp_path, model_class, config_class(**{**DEEPSEEK, **changes}))
    assert_family(tmp_path, model, grid, chunk=chunk, ep=chunk == 64)


@pytest.mark.parametrize("blocks", ["layers", "blocks"])
def test_text_model_of_kimi_k25(blocks: str, tmp_path: Path) -> None:
    """Published checkpoints say `layers`, transformers writes `blocks`; the vision tower is left."""
    config = Kimi_K25Config(
        text_config={**DEEPSEEK, "model_type": "deepseek_v3"},
        vision_config={"num_hidden_layers": 1, "hidden_size": 36, "num_attention_heads": 2, "intermediate_size": 20},
        projection_hidden_size=36,
        tie_word_embeddings=False,
    )
    model = write(tmp_path, Kimi_K25ForConditionalGeneration, config)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("language_model.model.blocks.")]:
            tensors[name.replace(".blocks.", f".{blocks}.")] = tensors.pop(name)

    change_tensors(tmp_path, rename)
    assert_family(tmp_path, model, (2, 2), lengths=[1, 65], ep=True)


@torch.no_grad()
def quantize(model: Any, directory: Path, block: tuple[int, int]) -> None:
    """Weights of the layers as e4m3 blocks, on disk; and what these stand for, in `model`."""

    def change(tensors: dict[str, Tensor]) -> None:
        state = model.state_dict()
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            weight = tensors[name]
            scale = torch.empty(-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
            values, whole = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                    scale[i, j] = weight[at].abs().max() / 448
                    values[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                    whole[at] = values[at].float() * scale[i, j]
            tensors[name], tensors[f"{name}_scale_inv"] = values, scale
            in_memory(state, name).copy_(whole)

    change_tensors(directory, change)
    path = directory / "config.json"
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def in_memory(state: dict[str, Tensor], name: str) -> Tensor:
    """The part of a transformers model that a tensor on disk becomes."""
    if name in state:
        return state[name]
    start, expert, kind, _ = name.rsplit(".", 3)
    if kind == "down_proj":
        return state[f"{start}.down_proj"][int(expert)]
    return state[f"{start}.gate_up_proj"][int(expert)].chunk(2)[kind == "up_proj"]


@pytest.mark.parametrize(("grid", "ep"), [((1, 1), False), ((2, 2), True), ((3, 3), False), ((4, 2), False)], ids=str)
def test_fp8_blocks(grid: tuple[int, int], ep: bool, tmp_path: Path) -> None:
    """Blocks that neither heads nor shares of the width divide."""
    model = write_qwen(tmp_path, moe_intermediate_size=14)
    quantize(model, tmp_path, (5, 8))
    assert_family(tmp_path, model, grid, lengths=[1, 70], ep=ep)
