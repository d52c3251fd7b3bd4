from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dcprt.errors import ModelError
from dcprt.spec import ModelSpec, RopeSpec
from dcprt.weights.hf_config import read_spec

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}


def spec(tmp_path: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **fields}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(tmp_path)


def test_defaults(tmp_path: Path) -> None:
    assert spec(tmp_path) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        max_position=4096,
        rms_eps=1e-6,
    )


def test_everything_given(tmp_path: Path) -> None:
    found = spec(
        tmp_path,
        generation={"eos_token_id": [7, 5]},
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_id=[5, 6],
        torch_dtype="bfloat16",
    )
    assert (found.num_kv_heads, found.head_dim, found.rms_eps) == (2, 16, 1e-5)
    assert found.rope == RopeSpec(theta=5e5)
    assert found.tie_embeddings and found.attention_bias and found.mlp_bias
    assert (found.bos_token_id, found.eos_token_ids, found.dtype) == (1, (5, 6, 7), "bfloat16")


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_scaling": None, "rope_theta": 10000}, RopeSpec()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, RopeSpec(theta=1e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(kind="linear", factor=2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4}}, RopeSpec(kind="linear", factor=4.0)),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            RopeSpec(kind="dynamic", factor=2.0, original_max_position=4096),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            RopeSpec(kind="yarn", factor=4.0, original_max_position=1024, attention_factor=0.1 * math.log(4.0) + 1),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16}},
            RopeSpec(kind="yarn", factor=4.0, original_max_position=4096, attention_factor=1.5, beta_fast=16.0),
        ),
    ],
)
def test_rope(tmp_path: Path, fields: dict[str, Any], expected: RopeSpec) -> None:
    assert spec(tmp_path, **fields).rope == expected


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_fp8_blocks(tmp_path: Path) -> None:
    assert spec(tmp_path, quantization_config=FP8).fp8_block == (128, 128)
    assert spec(tmp_path).fp8_block == ()


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rope_as_transformers_writes_it(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 2e4}
    if kind != "default":
        rope["factor"] = 2.0
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = 2048
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "architectures"}, rope_parameters=rope, dtype="bfloat16"
    )
    config.save_pretrained(tmp_path)
    found = read_spec(tmp_path)
    assert (found.rope.kind, found.rope.theta, found.dtype) == (kind, 2e4, "bfloat16")
    assert found.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["LlamaForCausalLn"]}, ["LlamaForCausalLn", "supported: LlamaForCausalLM"]),
        ({"architectures": ["GptOssForCausalLM"]}, ["GptOssForCausalLM", "attention sinks"]),
        ({"architectures": ["Qwen3NextForCausalLM"]}, ["Qwen3NextForCausalLM", "recurrent layers"]),
        ({"architectures": ["BloomForCausalLM"]}, ["BloomForCausalLM", "Glm4MoeForCausalLM"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": None}, ["architectures"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": True}, ["hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "8"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "without e4m3 blocks"]),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, ["quantization_config", "without e4m3 blocks"]),
        ({"quantization_config": {**FP8, "weight_block_size": [128]}}, ["quantization_config.weight_block_size"]),
        ({"quantization_config": {**FP8, "weight_block_size": [128, 0]}}, ["quantization_config.weight_block_size"]),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            ["rope_scaling.rope_type", "longrope", "yarn"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5.0}}, ["low_freq_factor"]),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        spec(tmp_path, **fields)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def test_model_type_instead_of_architectures(tmp_path: Path) -> None:
    assert spec(tmp_path, architectures=None, model_type="llama").architecture == "LlamaForCausalLM"


def test_no_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Cannot read"):
        read_spec(tmp_path)
    for text in ("{", "[]", '"x"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_spec(tmp_path)


def test_demo(demo_directory: Path) -> None:
    found = read_spec(demo_directory)
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.num_layers) == (9, 3, 64, 30)
    assert found.rope == RopeSpec(theta=1e5)
    assert (found.max_position, found.vocab_size, found.tie_embeddings) == (8192, 49152, True)
    assert (found.bos_token_id, found.eos_token_ids, found.rms_eps) == (1, (2,), 1e-5)
