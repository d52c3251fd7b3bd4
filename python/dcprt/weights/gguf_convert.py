"""A GGUF file of the Llama family, converted into a Hugging Face directory.

The weights are written as the float32 values that dequantization gives, so that every rank maps its slices
without knowing about quantization. A conversion is there whole or not at all: it is written into a directory
beside its target and renamed, under a lock that other processes wait for.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dcprt.errors import ModelError
from dcprt.weights.gguf_file import GgufFile, GgufTensor, read_gguf
from dcprt.weights.gguf_tokenizer import GgufTokenizer, read_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONVERSION_VERSION = 1
"""Part of the cache key; raise it with any change of what is written."""

_PARTIAL = ".partial-"
_CHUNK_ELEMENTS = 16 * 1024 * 1024
_ARCHITECTURES = ("llama",)


@dataclass(frozen=True)
class _Mapped:
    """A tensor on its way: source name, name and shape in the target, heads to reorder or 0."""

    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0


def convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Convert `source` into the directory `target`, unless it exists.

    Two processes may do so at once; the second waits for the first one's result. What killed conversions
    left beside `target` is removed.

    Raises:
        ModelError: the file cannot be converted, or the directory cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            if target.is_dir():
                return
            _sweep(target)
            _convert_locked(source, target, progress)
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"Cannot convert {source} into {target}: {reason}. $DCPRT_CACHE_DIR moves it."
        raise ModelError(text) from error


def _convert_locked(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    gguf = read_gguf(source)
    _check_supported(gguf)
    tokenizer = read_tokenizer(gguf)
    config = _config(gguf, tokenizer)
    tensors = _mapping(gguf, config)
    partial = target.with_name(f"{target.name}{_PARTIAL}{os.getpid()}")
    partial.mkdir()
    try:
        progress(f"Converting {source.name} to float32, once, into {target}")
        _write_text(partial / "config.json", json.dumps(config, indent=2))
        _write_bytes(partial / tokenizer.file_name, tokenizer.content)
        _write_text(partial / "tokenizer_config.json", json.dumps(tokenizer.tokenizer_config, indent=2))
        _write_safetensors(partial / "model.safetensors", gguf, tensors, progress)
        _sync_directory(partial)
        partial.rename(target)
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"Converted {source.name} in {time.monotonic() - started:.1f} s")


@contextmanager
def _locked(target: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `target`; the kernel releases it when the process dies."""
    with _lock_path(target).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that converts this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.lock")


def _sweep(target: Path) -> None:
    """Remove what killed conversions left. Called under the lock of `target`; others' locks are tried."""
    for left in target.parent.glob(f"*{_PARTIAL}*"):
        owner = left.with_name(left.name.partition(_PARTIAL)[0])
        if owner == target:
            shutil.rmtree(left, ignore_errors=True)
            continue
        with _lock_path(owner).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(left, ignore_errors=True)


def _check_supported(gguf: GgufFile) -> None:
    architecture = gguf.need("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: general.architecture is {architecture!r}; supported in GGUF files: "
            f"{', '.join(_ARCHITECTURES)}."
        )
    if (files := gguf.get("split.count", int, 1)) > 1:
        raise ModelError(f"{gguf.path} is one of {files} files of a split model; merge them first.")
    if gguf.get("llama.expert_count", int, 0):
        raise ModelError(f"{gguf.path}: llama.expert_count is set; mixtures of experts are not supported.")


def _config(gguf: GgufFile, tokenizer: GgufTokenizer) -> dict[str, Any]:
    """The contents of config.json."""
    hidden = gguf.need("llama.embedding_length", int)
    heads = gguf.need("llama.attention.head_count", int)
    if hidden < 1 or heads < 1:
        raise ModelError(f"{gguf.path} is damaged: embedding length {hidden}, {heads} heads.")
    head_dim = gguf.get("llama.attention.key_length", int, hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{gguf.path}: the head size is {head_dim}; rotary embedding needs an even one.")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (size := gguf.get(key, int, head_dim)) != head_dim:
            raise ModelError(f"{gguf.path}: {key} is {size}, but the head size {head_dim}; not supported.")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{gguf.path} has no tensor token_embd.weight.")
    eos = tokenizer.eos_token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.need("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.need("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": gguf.need("llama.context_length", int),
        "rms_norm_eps": _short(gguf.need("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _rope(gguf, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "dtype": "float32",
    }


def _short(value: float) -> float:
    """The shortest decimal of a number that was stored as float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _rope(gguf: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = _short(gguf.get("llama.rope.freq_base", float, 10000.0))
    kind = gguf.get("llama.rope.scaling.type", str, "none")
    linear = gguf.get("llama.rope.scaling.factor", float) or gguf.get("llama.rope.scale_linear", float)
    if kind not in ("none", "linear"):
        raise ModelError(f"{gguf.path}: llama.rope.scaling.type is {kind!r}; supported: none, linear.")
    frequencies = gguf.tensors.get("rope_freqs.weight")
    if frequencies is not None:
        return {"rope_theta": theta, **_llama3_rope(gguf, frequencies, theta, head_dim)}
    if linear and linear != 1.0 and (kind == "linear" or "llama.rope.scaling.type" not in gguf.metadata):
        return {"rope_type": "linear", "rope_theta": theta, "factor": _short(linear)}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(gguf: GgufFile, tensor: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, whose result GGUF files store as one divisor per frequency.

    The parameters are not stored. The published ones are tried, and must give the stored divisors.
    """
    import numpy as np

    stored = _dequantize(gguf, tensor, None).reshape(-1)
    factor, low, high, original = float(stored.max(initial=1.0)), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(f"{gguf.path}: rope_freqs.weight is not the scaling of Llama 3, and no other is supported.")
    return {
        "rope_type": "llama3",
        "factor": _short(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _mapping(gguf: GgufFile, config: dict[str, Any]) -> list[_Mapped]:
    """Every tensor that a model of this configuration has, in the order of their names in the target.

    Raises:
        ModelError: a tensor is missing, misshapen, or not part of the model; names it.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["head_dim"]
    linears = (
        ("attn_q", "self_attn.q_proj", heads * head_dim, hidden, heads, config["attention_bias"]),
        ("attn_k", "self_attn.k_proj", kv_heads * head_dim, hidden, kv_heads, config["attention_bias"]),
        ("attn_v", "self_attn.v_proj", kv_heads * head_dim, hidden, 0, config["attention_bias"]),
        ("attn_output", "self_attn.o_proj", hidden, heads * head_dim, 0, config["attention_bias"]),
        ("ffn_gate", "mlp.gate_proj", inner, hidden, 0, config["mlp_bias"]),
        ("ffn_up", "mlp.up_proj", inner, hidden, 0, config["mlp_bias"]),
        ("ffn_down", "mlp.down_proj", hidden, inner, 0, config["mlp_bias"]),
    )
    mapped = [
        _Mapped("token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden)),
        _Mapped("output_norm.weight", "model.norm.weight", (hidden,)),
    ]
    if not config["tie_word_embeddings"]:
        mapped.append(_Mapped("output.weight", "lm_head.weight", (config["vocab_size"], hidden)))
    for layer in range(config["num_hidden_layers"]):
        old, new = f"blk.{layer}.", f"model.layers.{layer}."
        mapped.append(_Mapped(f"{old}attn_norm.weight", f"{new}input_layernorm.weight", (hidden,)))
        mapped.append(_Mapped(f"{old}ffn_norm.weight", f"{new}post_attention_layernorm.weight", (hidden,)))
        for source, name, rows, columns, rotary, bias in linears:
            mapped.append(_Mapped(f"{old}{source}.weight", f"{new}{name}.weight", (rows, columns), rotary))
            if bias:
                mapped.append(_Mapped(f"{old}{source}.bias", f"{new}{name}.bias", (rows,), rotary))
    for item in mapped:
        found = gguf.tensors.get(item.source)
        if found is None:
            raise ModelError(f"{gguf.path} has no tensor {item.source}.")
        if found.shape != item.shape:
            raise ModelError(f"{gguf.path}: tensor {item.source} has shape {found.shape}, expected {item.shape}.")
    extra = gguf.tensors.keys() - {item.source for item in mapped} - {"rope_freqs.weight"}
    if extra:
        raise ModelError(f"{gguf.path} has tensors that are not supported: {', '.join(sorted(extra)[:5])}.")
    return sorted(mapped, key=lambda item: item.name)


def _dequantize(gguf: GgufFile, tensor: GgufTensor, rows: npt.NDArray[np.int64] | None) -> npt.NDArray[np.float32]:
    """All of a tensor, or `rows` of it in that order; float32, shape [rows, columns]."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    count = tensor.shape[0] if len(tensor.shape) > 1 else 1
    data = np.memmap(gguf.path, np.uint8, "r", tensor.offset, (count, tensor.size // count))
    kind = GGMLQuantizationType(tensor.type_id)
    try:
        values = dequantize(np.ascontiguousarray(data if rows is None else data[rows]), kind)
    except NotImplementedError:
        text = f"{gguf.path}: tensor {tensor.name} has the type {kind.name}, which is not supported."
        raise ModelError(text) from None
    return np.ascontiguousarray(values, np.float32)


def _row_order(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Source row of each target row: pairs (2j, 2j+1) inside a head become (j, j + head_dim/2)."""
    import numpy as np

    order = np.arange(rows, dtype=np.int64)
    return order.reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1) if heads else order


def _write_safetensors(path: Path, gguf: GgufFile, tensors: list[_Mapped], progress: Callable[[str], None]) -> None:
    """Write tensor by tensor, so that memory holds one piece of one tensor only."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in tensors:
        start, end = end, end + 4 * _elements(item.shape)
        header[item.name] = {"dtype": "F32", "shape": list(item.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    said = time.monotonic()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, item in enumerate(tensors):
            _write_tensor(file, gguf, item)
            if time.monotonic() - said > 1:
                said = time.monotonic()
                progress(f"Converted {number + 1} of {len(tensors)} tensors")
        _sync(file)


def _write_tensor(file: IO[bytes], gguf: GgufFile, item: _Mapped) -> None:
    tensor = gguf.tensors[item.source]
    if len(item.shape) == 1:
        values = _dequantize(gguf, tensor, None).reshape(-1)
        file.write((values[_row_order(item.shape[0], item.heads)] if item.heads else values).tobytes())
        return
    rows, columns = item.shape
    order = _row_order(rows, item.heads)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        file.write(_dequantize(gguf, tensor, order[start : start + step]).tobytes())


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _write_text(path: Path, text: str) -> None:
    _write_bytes(path, text.encode("utf-8"))


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
