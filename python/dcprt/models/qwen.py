"""Qwen2 and 2.5, Qwen3, and Qwen3-MoE (Qwen3 technical report, 2025)."""

from __future__ import annotations

from dcprt.models.base import ModelShard
from dcprt.models.decoder import Decoder, GQAttention, Layer, layer
from dcprt.models.experts import feed_forward
from dcprt.spec import ModelSpec
from dcprt.weights.loader import Loader


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Decoder:
    """Biases before the heads, in Qwen2 never behind them; from Qwen3 on, query and key heads are normalized."""

    def make(index: int, name: str) -> Layer:
        attention = GQAttention(
            spec,
            shard,
            load,
            f"{name}.self_attn",
            qkv_bias=spec.attention_bias,
            out_bias=spec.attention_bias and spec.architecture != "Qwen2ForCausalLM",
            qk_norm=spec.qk_norm,
        )
        return layer(spec, load, name, attention, feed_forward(spec, shard, load, f"{name}.mlp", index))

    return Decoder(spec, shard, load, make)
