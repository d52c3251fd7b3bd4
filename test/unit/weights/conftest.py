from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dcprt.weights.presets import PRESETS
from dcprt.weights.resolve import resolve

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    path = PRESETS["smollm2-135m"].find()
    if path is None:
        pytest.skip("the demo model's package is not installed")
    return path


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory, demo_gguf: Path) -> Iterator[Path]:
    """The converted demo model, in a cache of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCPRT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "demo-cache"))
        yield resolve("smollm2-135m", "auto", lambda line: None)


def byte_level_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(0x100 + i) for i in range(len(others))]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny Llama GGUF; `metadata` and `tensors` replace or, with None, remove what is in it."""

    def write(
        name: str = "tiny.gguf",
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray | None] | None = None,
        quantize: gguf.GGMLQuantizationType | None = None,
    ) -> Path:
        path = tmp_path / name
        values = {**_metadata(), **(metadata or {})}
        writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
        for key, value in values.items():
            _add(writer, key, value)
        for key, data in {**_tensors(), **(tensors or {})}.items():
            if data is None:
                continue
            if quantize is not None and data.ndim == 2:
                writer.add_tensor(key, gguf.quants.quantize(data, quantize), raw_dtype=quantize)
            else:
                writer.add_tensor(key, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _metadata() -> dict[str, Any]:
    tokens = ["<s>", "</s>", "<tool>", *byte_level_alphabet(), "he", "12"]
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def _tensors() -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return rng.standard_normal((rows, cols), np.float32)

    vocab = len(_metadata()["tokenizer.ggml.tokens"])
    found: dict[str, np.ndarray | None] = {
        "token_embd.weight": matrix(vocab, HIDDEN),
        "output_norm.weight": matrix(1, HIDDEN)[0],
        "output.weight": matrix(vocab, HIDDEN),
    }
    for layer in range(LAYERS):
        found |= {
            f"blk.{layer}.attn_norm.weight": matrix(1, HIDDEN)[0],
            f"blk.{layer}.ffn_norm.weight": matrix(1, HIDDEN)[0],
            f"blk.{layer}.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_gate.weight": matrix(INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": matrix(INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": matrix(HIDDEN, INNER),
        }
    return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
