"""What each family's config.json says: as published, as transformers writes it, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dcprt.errors import ModelError
from dcprt.models.registry import ARCHITECTURES, ignored, rows
from dcprt.spec import MLASpec, ModelSpec, MoESpec, RopeSpec
from dcprt.weights.hf_config import read_spec

BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
K2: dict[str, Any] = {
    **V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2_LITE: dict[str, Any] = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
GLM: dict[str, Any] = {
    **BASE,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}
QWEN_MOE: dict[str, Any] = {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
}
QWEN2: dict[str, Any] = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
MISTRAL: dict[str, Any] = {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": None}


def spec(tmp_path: Path, base: dict[str, Any], **changes: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**base, **changes}))
    return read_spec(tmp_path)


def yarn_scale(factor: float, all_dim: float) -> float:
    return 192**-0.5 * (0.1 * all_dim * math.log(factor) + 1) ** 2


def test_deepseek_v3(tmp_path: Path) -> None:
    found = spec(tmp_path, V3)
    assert found.mla == MLASpec(1536, 512, 128, 64, 128, pytest.approx(yarn_scale(40, 1.0)))
    assert found.moe == MoESpec(256, 8, 2048, 2048, 3, "sigmoid", True, 2.5, 8, 4, "top2", True)
    assert (found.num_kv_heads, found.head_dim, found.rotary_dim) == (1, 576, 64)
    assert found.rope == RopeSpec(kind="yarn", factor=40.0, original_max_position=4096, attention_factor=1.0)
    assert found.rope_interleaved and found.fp8_block == (128, 128) and found.dtype == "bfloat16"
    assert [found.moe.routed(i) for i in range(5)] == [False, False, False, True, True]
    assert "model.layers.61.*" in ignored(found)


def test_kimi_k2_and_the_text_model_of_k25(tmp_path: Path) -> None:
    found = spec(tmp_path, K2)
    assert found.moe == MoESpec(384, 8, 2048, 2048, 1, "sigmoid", True, 2.827, 1, 1, "top2", True)
    assert found.mla is not None and found.mla.softmax_scale == pytest.approx(yarn_scale(32, 1.0))
    assert (found.num_heads, found.mtp_layers, found.rope.theta) == (64, 0, 50000.0)
    text = {**K2, "quantization_config": None, "eos_token_id": 163586}
    for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"):
        outer = {"architectures": [name], "model_type": "kimi_k25", "text_config": text, "vision_config": {}}
        nested = spec(tmp_path, outer)
        assert (nested.mla, nested.moe, nested.rope) == (found.mla, found.moe, found.rope)
        assert (nested.architecture, nested.eos_token_ids, nested.dtype) == (name, (163586,), "bfloat16")
    with pytest.raises(ModelError, match=r"text_config\.quantization_config.*compressed-tensors"):
        packed = {**text, "quantization_config": {"quant_method": "compressed-tensors"}}
        spec(tmp_path, {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": packed})
    with pytest.raises(ModelError, match="text_config is missing"):
        spec(tmp_path, {"architectures": ["KimiK25ForConditionalGeneration"]})


def test_deepseek_v2(tmp_path: Path) -> None:
    found = spec(tmp_path, V2_LITE)
    assert found.mla == MLASpec(0, 512, 128, 64, 128, pytest.approx(yarn_scale(40, 0.707)))
    assert found.moe == MoESpec(64, 6, 1408, 2816, 1, "softmax", False, 1.0)
    assert found.rope.attention_factor == 1.0 and found.rope_interleaved
    full = spec(
        tmp_path,
        V2_LITE,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        q_lora_rank=1536,
        routed_scaling_factor=16.0,
    )
    assert full.moe == MoESpec(64, 6, 1408, 2816, 1, "softmax", False, 16.0, 8, 3)
    assert full.mla is not None and full.mla.q_lora_rank == 1536


def test_glm(tmp_path: Path) -> None:
    found = spec(tmp_path, GLM)
    assert found.moe == MoESpec(160, 8, 1536, 1536, 3, "sigmoid", True, 2.5, 1, 1, "top2", True)
    assert (found.rotary_dim, found.qk_norm, found.attention_bias, found.mtp_layers) == (64, True, True, 1)
    new = spec(tmp_path, GLM, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25})
    assert new.rotary_dim == 32


def test_qwen(tmp_path: Path) -> None:
    dense = spec(tmp_path, QWEN2)
    assert dense.attention_bias and not dense.qk_norm and dense.moe is None
    late = spec(tmp_path, QWEN2, use_sliding_window=True, max_window_layers=6)
    assert late == dense
    for changes in ({}, {"num_experts": None, "num_local_experts": 128}):
        assert spec(tmp_path, QWEN_MOE, **changes).moe == MoESpec(128, 8, 1536)
    mixed = spec(tmp_path, QWEN_MOE, decoder_sparse_step=2, mlp_only_layers=[3]).moe
    assert mixed is not None and [mixed.routed(i) for i in range(6)] == [False, True, False, False, False, True]


def test_mistral(tmp_path: Path) -> None:
    assert not spec(tmp_path, MISTRAL).attention_bias
    assert spec(tmp_path, MISTRAL, sliding_window=4096) == spec(tmp_path, MISTRAL)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (MISTRAL, {"sliding_window": 1024}, ["sliding_window", "1024"]),
        (MISTRAL, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "MistralForCausalLM"]),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 5}, ["use_sliding_window"]),
        (QWEN2, {"use_sliding_window": True}, ["use_sliding_window"]),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 8}}, ["dual_chunk_attention_config"]),
        (QWEN_MOE, {"num_experts": None}, ["num_local_experts", "missing"]),
        (QWEN_MOE, {"num_experts_per_tok": 129}, ["num_experts_per_tok", "128"]),
        (QWEN_MOE, {"mlp_only_layers": "all"}, ["mlp_only_layers", "'all'"]),
        (GLM, {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        (GLM, {"head_dim": 10}, ["head_dim is 10", "5 are rotated"]),
        (GLM, {"n_group": 3}, ["n_routed_experts", "n_group (3)"]),
        (GLM, {"n_group": 160, "topk_group": 8}, ["n_group", "at most half"]),
        (V3, {"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
        (V3, {"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
        (V3, {"topk_group": 9}, ["topk_group", "n_group (8)"]),
        (V3, {"num_experts_per_tok": 129}, ["num_experts_per_tok", "at most 128"]),
        (V3, {"moe_layer_freq": 2}, ["moe_layer_freq", "only 1"]),
        (V3, {"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "even"]),
        (V3, {"n_shared_experts": -1}, ["n_shared_experts", "-1"]),
        (V3, {"first_k_dense_replace": True}, ["first_k_dense_replace"]),
        (V3, {"rope_interleave": 1}, ["rope_interleave"]),
        (V2_LITE, {"topk_method": "noaux_tc"}, ["topk_method", "group_limited_greedy"]),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, ["n_group", "missing"]),
        (V2_LITE, {"norm_topk_prob": True}, ["norm_topk_prob"]),
        (V2_LITE, {"mlp_bias": True}, ["mlp_bias"]),
        (V2_LITE, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_errors_name_file_and_field(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        spec(tmp_path, base, **changes)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def test_model_type_instead_of_architectures(tmp_path: Path) -> None:
    for base in (V3, V2_LITE):
        assert spec(tmp_path, base, architectures=None).architecture == base["architectures"][0]
    assert spec(tmp_path, {**GLM, "model_type": "glm4_moe"}, architectures=None).qk_norm


def test_rows_name_modules_that_exist() -> None:
    root = Path(__file__).parents[3] / "python" / "dcprt"
    assert {name for name, *_ in rows()} == set(ARCHITECTURES)
    for _, module, checkpoints, special in rows():
        assert (root / module).is_file() and checkpoints and special
