"""Llama checkpoints as transformers writes them: logits agree within 1e-5 of the largest, on every grid."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from dcprt.errors import ModelError

from .harness import Harness, relative_error, write_llama

TOLERANCE = 1e-5
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 5e5,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 6},
    **{name: {"rope_parameters": rope} for name, rope in ROPES.items()},
}
GRIDS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (5, 5), (6, 3), (8, 1)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(131) for _ in range(length)]


@torch.inference_mode()
def expected(model: LlamaForCausalLM, tokens: list[int], prompt_len: int) -> torch.Tensor:
    """Logits for every token behind the prompt, from one pass over the whole text."""
    return model(torch.tensor([tokens])).logits[0, prompt_len - 1 : -1]


def assert_agrees(harness: Harness, model: LlamaForCausalLM, prompt: list[int], count: int = 6) -> None:
    request, logits = harness.greedy(prompt, count)
    reference = expected(model, list(request.tokens), len(prompt))
    assert relative_error(logits, reference) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, tmp_path: Path) -> None:
    model = write_llama(tmp_path, **KINDS[kind])
    for tp, dcp in [(1, 1), (2, 2), (3, 1), (4, 2)]:
        with Harness(tmp_path, tp=tp, dcp=dcp, page_size=4, chunked_prefill_size=64) as harness:
            for length in (1, 3, 130, 300):
                assert_agrees(harness, model, prompt_of(length, seed=length))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("page_size", "interleave", "chunk"), [(1, 1, 64), (4, 2, 7), (16, 16, 2048)])
def test_grids(grid: tuple[int, int], page_size: int, interleave: int, chunk: int, tmp_path: Path) -> None:
    """K2, K3, K4: six tokens on eight ranks, chunks that divide nothing."""
    model = write_llama(tmp_path)
    options = {"page_size": page_size, "dcp_interleave": interleave, "chunked_prefill_size": chunk}
    with Harness(tmp_path, tp=grid[0], dcp=grid[1], **options) as harness:
        for length in (1, 6, 10, 65, 211):
            assert_agrees(harness, model, prompt_of(length, seed=length))


def test_prefix_reuse_cut_at_every_position_of_a_span(tmp_path: Path) -> None:
    """K1, K10: whatever the length of the common prefix, what is reused is exactly that, and logits do not change."""
    model = write_llama(tmp_path)
    base = prompt_of(70)
    with Harness(tmp_path, tp=2, dcp=2, page_size=8, dcp_interleave=2) as harness:
        harness.greedy(base, 4)
        for shared in range(30, 64):
            prompt = [*base[:shared], (base[shared] + 1) % 131, *prompt_of(9, seed=shared)]
            request, logits = harness.greedy(prompt, 3)
            assert request.cached_len == shared
            assert relative_error(logits, expected(model, list(request.tokens), len(prompt))) <= TOLERANCE


def test_a_second_turn_reuses_generated_tokens(tmp_path: Path) -> None:
    """K8: all but the last token, which had no KV yet."""
    model = write_llama(tmp_path)
    with Harness(tmp_path, tp=4, dcp=4, page_size=4) as harness:
        first, _ = harness.greedy(prompt_of(100), 50)
        turn = list(first.tokens) + prompt_of(50, seed=9)
        request, logits = harness.greedy(turn, 4)
        assert request.cached_len == 149
        assert relative_error(logits, expected(model, list(request.tokens), len(turn))) <= TOLERANCE


def test_recycled_pages_carry_nothing_over(tmp_path: Path) -> None:
    """K5: many times the pool is allocated, then an early prompt gives the same logits again."""
    model = write_llama(tmp_path)
    with Harness(tmp_path, tp=2, dcp=2, page_size=4, kv_cache_tokens=256) as harness:
        _, before = harness.greedy(prompt_of(90), 5)
        for seed in range(1, 12):
            assert_agrees(harness, model, prompt_of(150 + seed, seed=seed))
        request, after = harness.greedy(prompt_of(90), 5)
        assert request.cached_len == 0
        assert torch.equal(before, after)


def test_up_to_the_context_limit(tmp_path: Path) -> None:
    """K6: nothing is written outside the request's own pages, though the last page is only partly used."""
    model = write_llama(tmp_path, max_position_embeddings=200)
    with Harness(tmp_path, tp=4, dcp=4, page_size=16, kv_cache_tokens=512) as harness:
        assert_agrees(harness, model, prompt_of(197), count=3)
        assert_agrees(harness, model, prompt_of(195, seed=1), count=5)
        assert_agrees(harness, model, prompt_of(197), count=3)


def test_equal_tokens_under_another_salt_share_nothing(tmp_path: Path) -> None:
    """K13."""
    write_llama(tmp_path)
    with Harness(tmp_path, tp=1, dcp=1) as harness:
        _, first = harness.greedy(prompt_of(40), 3, namespace="a")
        request, second = harness.greedy(prompt_of(40), 3, namespace="b")
        assert request.cached_len == 0
        assert torch.equal(first, second)
        assert harness.greedy(prompt_of(40), 3, namespace="a")[0].cached_len == 39


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path, num_hidden_layers=2)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelError, match=r"model\.layers\.2\."):
        Harness(tmp_path)
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 1'))
    with pytest.raises(ModelError, match="does not use"):
        Harness(tmp_path)
    config.write_text(config.read_text().replace('"hidden_size": 36', '"hidden_size": 32'))
    with pytest.raises(ModelError, match=r"\(131, 36\).*\(131, 32\)"):
        Harness(tmp_path)


def test_dummy_weights_are_the_same_on_every_grid(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    results = []
    for tp, dcp in [(1, 1), (4, 2)]:
        with Harness(tmp_path, tp=tp, dcp=dcp, load_format="dummy") as harness:
            results.append(harness.greedy(prompt_of(20), 5)[1])
    assert relative_error(results[1], results[0]) <= TOLERANCE
