"""Every family under the modes of DCP: both combines, queries gathered or replicated, K and V gathered, experts cut.

A pairwise cover of grid, combine, replication and chunk over five families; two cases a family by default.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from .checkpoints import SHAPE, TOLERANCE, prompt_of, reference, write
from .harness import Harness, relative_error

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 10}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 8}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "num_key_value_heads": 1}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**MOE, "head_dim": 8, "num_experts": 5, "norm_topk_prob": True},
    ),
    "glm": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {**MOE, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **MOE,
            "num_key_value_heads": 6,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
GRIDS = [(1, 1), (2, 2), (4, 2), (4, 4), (3, 3)]


@dataclass(frozen=True)
class Mode:
    """One row of the cover."""

    grid: tuple[int, int]
    comm: str
    replicate_q: bool
    chunk: int

    def __str__(self) -> str:
        replicated = "-replicated" if self.replicate_q else ""
        return f"tp{self.grid[0]}-dcp{self.grid[1]}-{self.comm}{replicated}-chunk{self.chunk}"


MODES = [
    Mode((2, 2), "a2a", True, 64),
    Mode((4, 2), "ag_rs", True, 2048),
    Mode((4, 4), "a2a", False, 2048),
    Mode((3, 3), "ag_rs", False, 64),
    Mode((2, 2), "ag_rs", False, 2048),
    Mode((4, 2), "a2a", False, 64),
    Mode((4, 4), "ag_rs", True, 64),
    Mode((3, 3), "a2a", True, 2048),
    Mode((1, 1), "a2a", True, 2048),
    Mode((1, 1), "ag_rs", False, 64),
]


def check(family: str, mode: Mode, directory: Path, lengths: tuple[int, ...]) -> None:
    model_class, config_class, changes = FAMILIES[family]
    model = write(directory, model_class, config_class(**{**SHAPE, **changes}))
    options = {"dcp_comm": mode.comm, "dcp_replicate_q": mode.replicate_q, "chunked_prefill_size": mode.chunk}
    with Harness(directory, tp=mode.grid[0], dcp=mode.grid[1], page_size=4, ep=mode.replicate_q, **options) as harness:
        for length in lengths:
            prompt = prompt_of(length, seed=length)
            request, logits = harness.greedy(prompt, 4)
            assert relative_error(logits, reference(model, list(request.tokens), length)) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "mode"), [(f, MODES[(2 * i + j) % 8]) for i, f in enumerate(FAMILIES) for j in (0, 1)], ids=str
)
def test_a_family_under_two_modes(family: str, mode: Mode, tmp_path: Path) -> None:
    check(family, mode, tmp_path, (1, 7, 140))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_every_mode(family: str, mode: Mode, tmp_path: Path) -> None:
    check(family, mode, tmp_path, (1, 2, 63, 64, 65, 250, 600))


def test_modes_cover_all_pairs() -> None:
    rows = [(m.grid, m.comm, m.replicate_q, m.chunk) for m in MODES]
    for i, j in itertools.combinations(range(4), 2):
        wanted = set(itertools.product({row[i] for row in rows}, {row[j] for row in rows}))
        assert wanted == {(row[i], row[j]) for row in rows}


@pytest.mark.parametrize("options", [{}, {"dcp_replicate_q": True, "dcp_comm": "a2a"}], ids=str)
def test_a_grid_that_divides_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    """tp 12, dcp 4, 24 query heads and 2 KV heads: three head shards, one of two KV heads held twice."""
    shape = {"num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 48}
    model = write(tmp_path, LlamaForCausalLM, LlamaConfig(**{**SHAPE, **shape}))
    with Harness(tmp_path, tp=12, dcp=4, page_size=4, chunked_prefill_size=30, **options) as harness:
        for length in (1, 6, 100):
            prompt = prompt_of(length, seed=length)
            request, logits = harness.greedy(prompt, 3)
            assert relative_error(logits, reference(model, list(request.tokens), length)) <= TOLERANCE
