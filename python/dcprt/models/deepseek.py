"""DeepSeek-V2, V2-Lite, V3 and R1, and Kimi K2, which has the same layout: latent attention and routed experts."""

from __future__ import annotations

from dcprt.models.base import ModelShard
from dcprt.models.decoder import Decoder, Layer, layer
from dcprt.models.experts import feed_forward
from dcprt.models.latent import LatentAttention
from dcprt.spec import ModelSpec
from dcprt.weights.loader import Loader


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Decoder:
    """Latent attention everywhere; the first layers have a plain MLP, the others experts."""

    def make(index: int, name: str) -> Layer:
        mlp = feed_forward(spec, shard, load, f"{name}.mlp", index)
        return layer(spec, load, name, LatentAttention(spec, shard, load, f"{name}.self_attn"), mlp)

    return Decoder(spec, shard, load, make)
