from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from dcprt.errors import ModelError
from dcprt.weights.gguf_convert import convert
from dcprt.weights.gguf_file import read_gguf

RESOLVE = (
    "import sys; from dcprt.weights.resolve import resolve; "
    "print(resolve('smollm2-135m', 'auto', lambda line: print('>', line, flush=True)))"
)


def quiet(line: str) -> None:
    """Takes progress and says nothing."""


def start_resolve(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "DCPRT_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", RESOLVE], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def reader(demo_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(demo_gguf)


def test_demo_values_are_exactly_those_of_gguf(reader: gguf.GGUFReader, demo_directory: Path) -> None:
    written = load_file(demo_directory / "model.safetensors")
    assert len(written) == len(reader.tensors)
    stems = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.startswith("blk."):
            _, layer, stem, _ = tensor.name.split(".")
            found = written[f"model.layers.{layer}.{stems[stem]}.weight"]
            if stem in ("attn_q", "attn_k"):
                halves = found.reshape(-1, 2, 32, found.shape[1])
                found = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(found.shape)
        else:
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
            }
            found = written[name[tensor.name]]
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32), err_msg=tensor.name)


def test_demo_config(demo_directory: Path) -> None:
    config = json.loads((demo_directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    tokenizer = json.loads((demo_directory / "tokenizer_config.json").read_text())
    assert (tokenizer["bos_token"], tokenizer["eos_token"], tokenizer["add_bos_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        False,
    )


def test_transformers_reads_it_and_knows_the_capital_of_france(demo_directory: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(demo_directory, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(demo_directory)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert ids.tolist() == [[504, 3575, 282, 4649, 314]]
    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=2)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])


def test_header_agrees_with_the_gguf_package(reader: gguf.GGUFReader, demo_gguf: Path) -> None:
    mine = read_gguf(demo_gguf)
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        t.name: (t.offset, t.size) for t in mine.tensors.values()
    }
    for key, value in mine.metadata.items():
        assert reader.fields[key].contents() == value, key


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16])
def test_tiny_model_of_every_kind(
    write_gguf: Callable[..., Path], tmp_path: Path, kind: gguf.GGMLQuantizationType | None
) -> None:
    source = write_gguf(quantize=kind)
    convert(source, tmp_path / "out", quiet)
    written = load_file(tmp_path / "out" / "model.safetensors")
    reader = gguf.GGUFReader(source)
    by_name = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    np.testing.assert_array_equal(written["lm_head.weight"], by_name["output.weight"])
    query = by_name["blk.1.attn_q.weight"]
    for head in range(4):
        for pair in range(4):
            for half in range(2):
                np.testing.assert_array_equal(
                    written["model.layers.1.self_attn.q_proj.weight"][head * 8 + half * 4 + pair],
                    query[head * 8 + 2 * pair + half],
                )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_biases_are_reordered_too(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    extra = {
        f"blk.{layer}.{name}.bias": np.arange(size, dtype=np.float32)
        for layer in range(2)
        for name, size in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32))
    }
    convert(write_gguf(tensors=extra), tmp_path / "out", quiet)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.self_attn.k_proj.bias"].tolist()[:8] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert written["model.layers.0.self_attn.v_proj.bias"].tolist() == list(range(16))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_bias"] is True


def llama3_divisors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """The published rule, frequency by frequency."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_rope_scaling(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    def rope(name: str, **options: object) -> dict[str, object]:
        convert(write_gguf(f"{name}.gguf", **options), tmp_path / name, quiet)
        return json.loads((tmp_path / name / "config.json").read_text())["rope_parameters"]

    assert rope("default") == {"rope_type": "default", "rope_theta": 500000.0}
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert rope("linear", metadata=linear) == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}
    llama3 = rope("llama3", tensors={"rope_freqs.weight": llama3_divisors(32.0, 500000.0, 8)})
    assert (llama3["rope_type"], llama3["factor"], llama3["original_max_position_embeddings"]) == (
        "llama3",
        32.0,
        8192,
    )
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        rope("strange", tensors={"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)})
    with pytest.raises(ModelError, match="'yarn'"):
        rope("yarn", metadata={"llama.rope.scaling.type": "yarn"})


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"general.architecture": "qwen9"}, {}, ["general.architecture", "'qwen9'", "llama"]),
        ({"tokenizer.ggml.pre": "smolm"}, {}, ["tokenizer.ggml.pre", "'smolm'", "Did you mean 'smollm'"]),
        ({"tokenizer.ggml.pre": "default"}, {}, ["tokenizer.ggml.pre", "'default'"]),
        ({"tokenizer.ggml.pre": None}, {}, ["no tokenizer.ggml.pre"]),
        ({"tokenizer.ggml.model": "bert"}, {}, ["tokenizer.ggml.model", "'bert'", "gpt2", "llama"]),
        ({"llama.expert_count": 8}, {}, ["llama.expert_count"]),
        ({"llama.block_count": None}, {}, ["llama.block_count"]),
        ({"llama.block_count": "two"}, {}, ["llama.block_count", "'two'"]),
        ({"llama.attention.head_count": [4, 4]}, {}, ["llama.attention.head_count"]),
        ({"llama.rope.dimension_count": 4}, {}, ["llama.rope.dimension_count"]),
        ({"tokenizer.ggml.eos_token_id": 9999}, {}, ["eos_token_id", "9999"]),
        ({"tokenizer.ggml.merges": ["h zz"]}, {}, ["tokenizer", "damaged"]),
        ({}, {"blk.1.ffn_up.weight": None}, ["blk.1.ffn_up.weight"]),
        (
            {},
            {"blk.1.ffn_up.weight": np.zeros((3, 32), np.float32)},
            ["blk.1.ffn_up.weight", "(3, 32)", "(64, 32)"],
        ),
        ({}, {"blk.1.strange.weight": np.zeros(32, np.float32)}, ["blk.1.strange.weight"]),
    ],
)
def test_refused_by_name_and_nothing_left(
    write_gguf: Callable[..., Path], tmp_path: Path, metadata: dict, tensors: dict, words: list[str]
) -> None:
    source = write_gguf(metadata=metadata, tensors=tensors)
    with pytest.raises(ModelError) as caught:
        convert(source, tmp_path / "cache" / "out", quiet)
    for word in words:
        assert word in str(caught.value)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["out.lock"]


def test_versions_and_magic(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    for version in (0, 1, 4):
        path.write_bytes(whole[:4] + version.to_bytes(4, "little") + whole[8:])
        with pytest.raises(ModelError, match=f"GGUF version {version}"):
            read_gguf(path)
    path.write_bytes(whole[:4] + (3).to_bytes(4, "big") + whole[8:])
    with pytest.raises(ModelError, match="big-endian"):
        read_gguf(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelError, match="no GGUF file"):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="empty"):
        read_gguf(path)
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(path.with_name("absent.gguf"))


def test_every_truncation_is_noticed(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    header = min(t.offset for t in read_gguf(path).tensors.values())
    data_end = max(t.offset + t.size for t in read_gguf(path).tensors.values())
    for size in [*range(4, header, 37), header, header + 1, len(whole) // 2, data_end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="truncated"):
            read_gguf(path)


def test_damaged_headers_are_model_errors(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    header = min(t.offset for t in read_gguf(path).tensors.values())
    rng = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(4, header, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ModelError:
            continue


def test_two_processes_convert_once(tmp_path: Path, demo_gguf: Path) -> None:
    processes = [start_resolve(tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sum("Converting" in line for lines in outputs for line in lines) == 1
    assert sorted(p.name for p in Path(outputs[0][-1]).iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_killed_conversion_leaves_nothing_for_long(tmp_path: Path, demo_directory: Path) -> None:
    process = start_resolve(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("converted/*.partial-*/model.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    converted = tmp_path / "converted"
    assert len(list(converted.glob("*.partial-*"))) == 1
    (converted / "v0-abc.partial-1").mkdir()
    second = start_resolve(tmp_path)
    path = Path(second.communicate(timeout=60)[0].splitlines()[-1])
    assert second.returncode == 0
    assert list(converted.glob("*.partial-*")) == []
    assert (path / "model.safetensors").read_bytes() == (demo_directory / "model.safetensors").read_bytes()
