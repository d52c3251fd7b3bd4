"""Llama 2, 3 and 3.x, and checkpoints of the same layout (SmolLM2)."""

from __future__ import annotations

from dcprt.models.base import ModelShard
from dcprt.models.decoder import Decoder, GQAttention, Layer, gated_mlp, layer
from dcprt.spec import ModelSpec
from dcprt.weights.loader import Loader


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Decoder:
    """Grouped-query attention and a gated MLP in every layer; biases where the checkpoint has them."""

    def make(_: int, name: str) -> Layer:
        bias = spec.attention_bias
        attention = GQAttention(spec, shard, load, f"{name}.self_attn", qkv_bias=bias, out_bias=bias)
        mlp = gated_mlp(spec, shard, load, f"{name}.mlp", bias=spec.mlp_bias)
        return layer(spec, load, name, attention, mlp)

    return Decoder(spec, shard, load, make)
