"""GLM-4.5 and 4.6 (GLM-4.5 technical report, 2025)."""

from __future__ import annotations

from dcprt.models.base import ModelShard
from dcprt.models.decoder import Decoder, GQAttention, Layer, layer
from dcprt.models.experts import feed_forward
from dcprt.spec import ModelSpec
from dcprt.weights.loader import Loader


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Decoder:
    """Half of each head is rotated; the output product never has a bias; experts behind the first layers."""

    def make(index: int, name: str) -> Layer:
        attention = GQAttention(
            spec, shard, load, f"{name}.self_attn", qkv_bias=spec.attention_bias, qk_norm=spec.qk_norm
        )
        return layer(spec, load, name, attention, feed_forward(spec, shard, load, f"{name}.mlp", index))

    return Decoder(spec, shard, load, make)
