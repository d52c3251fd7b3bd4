"""Latent attention against transformers' DeepSeek-V2 and V3: every grid, both combines, queries replicated or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from dcprt.config import Config
from dcprt.planner.capacity import plan_capacity
from dcprt.weights.hf_config import read_spec

from .harness import Harness, relative_error

TOLERANCE = 1e-5
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 50,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 1e4,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
}
NATIVE_SIZES = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 24}
"""Every dimension of a head is one that the kernels take; with those above torch computes some of the attention."""
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {"q_lora_rank": 16}),
    "v3-yarn": (DeepseekV3Config, DeepseekV3ForCausalLM, {"q_lora_rank": 16, "rope_parameters": YARN}),
    "v3-no-q-lora": (DeepseekV3Config, DeepseekV3ForCausalLM, {"q_lora_rank": None, "attention_bias": True}),
    "v2": (DeepseekV2Config, DeepseekV2ForCausalLM, {"q_lora_rank": 16}),
    "v3-native": (DeepseekV3Config, DeepseekV3ForCausalLM, {"q_lora_rank": 16, **NATIVE_SIZES}),
    "v2-lite": (DeepseekV2Config, DeepseekV2ForCausalLM, {"q_lora_rank": None, "rope_parameters": YARN}),
}


def write(directory: Path, kind: str) -> Any:
    config, model, changes = KINDS[kind]
    torch.manual_seed(0)
    made = model(config(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "a_layernorm" in name:
                parameter.uniform_(0.5, 1.5)
    made.save_pretrained(directory)
    return made


def prompt_of(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(131) for _ in range(length)]


@torch.inference_mode()
def assert_agrees(harness: Harness, model: Any, prompt: list[int], count: int = 4) -> None:
    request, logits = harness.greedy(prompt, count)
    reference = model(torch.tensor([list(request.tokens)])).logits[0, len(prompt) - 1 : -1]
    assert relative_error(logits, reference) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (4, 2), (3, 3)], ids=str)
def test_kinds(kind: str, grid: tuple[int, int], tmp_path: Path) -> None:
    model = write(tmp_path, kind)
    with Harness(tmp_path, tp=grid[0], dcp=grid[1], page_size=4, chunked_prefill_size=64) as harness:
        for length in (1, 5, 130, 260):
            assert_agrees(harness, model, prompt_of(length, seed=length))


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("replicated", [False, True])
def test_bfloat16(grid: tuple[int, int], replicated: bool, tmp_path: Path) -> None:
    """As near to float32 as its rounding, by 2^-9, allows after three layers."""
    write(tmp_path, "v3-native")
    prompts = [prompt_of(length, seed=length) for length in (1, 5, 130)]

    def logits(dtype: str) -> torch.Tensor:
        sizes = {"tp": grid[0], "dcp": grid[1], "page_size": 4, "chunked_prefill_size": 64}
        with Harness(tmp_path, dtype=dtype, dcp_replicate_q=replicated, **sizes) as harness:
            return torch.cat([harness.greedy(prompt, 1)[1] for prompt in prompts])

    assert relative_error(logits("bfloat16"), logits("float32")) <= 0.1


@pytest.mark.parametrize("grid", [(2, 2), (4, 2), (4, 4), (8, 8)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"dcp_comm": "a2a"},
        {"dcp_replicate_q": True},
        {"dcp_comm": "a2a", "dcp_replicate_q": True, "chunked_prefill_size": 2048},
        {"dcp_comm": "auto", "dcp_workspace": "2K"},
        {"dcp_workspace": "1K", "dcp_replicate_q": True, "dcp_interleave": 4},
    ],
    ids=str,
)
def test_modes(grid: tuple[int, int], options: dict[str, Any], tmp_path: Path) -> None:
    """K2 to K4 among them: six tokens on eight ranks, chunks that divide nothing."""
    model = write(tmp_path, "v3-yarn")
    with Harness(
        tmp_path, tp=grid[0], dcp=grid[1], **{"page_size": 4, "chunked_prefill_size": 50, **options}
    ) as harness:
        for length in (1, 6, 10, 211):
            assert_agrees(harness, model, prompt_of(length, seed=length))


@pytest.mark.parametrize(("dcp", "interleave"), [(2, 16), (4, 16), (8, 16), (4, 1), (8, 1)])
def test_ranks_with_an_empty_shard_take_part(dcp: int, interleave: int, tmp_path: Path) -> None:
    """K2, K3: contexts of 2, 6 and 10 tokens; K4: a prompt in many chunks gives the logits of one."""
    model = write(tmp_path, "v3")
    sizes = {"page_size": 16, "dcp_interleave": interleave}
    with Harness(tmp_path, tp=dcp, dcp=dcp, chunked_prefill_size=3, **sizes) as harness:
        for length in (2, 6, 10, 47):
            assert_agrees(harness, model, prompt_of(length, seed=length))


def test_prefix_reuse_cut_at_every_position_of_a_span(tmp_path: Path) -> None:
    model = write(tmp_path, "v3")
    base = prompt_of(70, seed=0)
    with Harness(tmp_path, tp=4, dcp=4, page_size=4, dcp_interleave=2) as harness:
        harness.greedy(base, 4)
        for shared in range(32, 64):
            prompt = [*base[:shared], (base[shared] + 1) % 131, *prompt_of(5, seed=shared)]
            request, logits = harness.greedy(prompt, 2)
            assert request.cached_len == shared
            reference = model(torch.tensor([list(request.tokens)])).logits[0, len(prompt) - 1 : -1].detach()
            assert relative_error(logits, reference) <= TOLERANCE


def test_bytes_per_token(tmp_path: Path) -> None:
    """dcp=8 takes an eighth of dcp=1, whose ranks each hold the whole latent."""
    write(tmp_path, "v3")
    spec = read_spec(tmp_path)
    for dcp in (1, 2, 8):
        config = Config.of(model=str(tmp_path), tp=8, dcp=dcp, dtype="bfloat16", kv_cache_tokens=4096)
        assert plan_capacity(config, spec).bytes_per_token == 3 * (20 + 8) * 2 / dcp
