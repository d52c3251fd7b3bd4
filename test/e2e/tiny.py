"""Tiny models with the demo model's tokenizer: servers that start in no time and say nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dcprt.weights.resolve import resolve

from .server import MODEL

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant:"
HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 64, 2, 4, 2, 128, 49152
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def directory(path: Path, *, template: bool = True, tokenizer: bool = True) -> Path:
    """A model for `--load-format dummy`, with or without chat template and tokenizer."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        demo = resolve(MODEL, "auto", lambda line: None)
        (path / "tokenizer.json").symlink_to(demo / "tokenizer.json")
        settings: dict[str, Any] = json.loads((demo / "tokenizer_config.json").read_text())
        if not template:
            del settings["chat_template"]
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def flags(model: Path) -> tuple[str, ...]:
    """What a server of such a model needs on its command line."""
    return "--model", str(model), "--load-format", "dummy", "--dtype", "float32"


def poisoned_directory(path: Path, token: int) -> Path:
    """Real weights, sound but for the embedding of one token: whatever attends to it is not a number."""
    directory(path)
    generator = torch.Generator().manual_seed(0)
    head = HIDDEN // HEADS

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator) * 0.1

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.embed_tokens.weight"][token] = torch.nan
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, cols in (
            ("self_attn.q_proj", HEADS * head, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * head, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * head, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * head),
            ("mlp.gate_proj", WIDTH, HIDDEN),
            ("mlp.up_proj", WIDTH, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDTH),
        ):
            tensors[f"{layer}{name}.weight"] = matrix(rows, cols)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, path / "model.safetensors")
    return path
