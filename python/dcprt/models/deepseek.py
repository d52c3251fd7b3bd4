"""DeepSeek-V2, V2-Lite, V3 and R1, and Kimi K2, which has the same layout: latent attention and routed experts."""

from __future__ import annotations

from dcprt.config import ModelSpec
from dcprt.models.base import ModelShard
from dcprt.models.decoder import Decoder, Layer, gated_mlp, layer
from dcprt.models.latent import LatentAttention
from dcprt.weights.loader import Loader


def build(spec: ModelSpec, shard: ModelShard, load: Loader) -> Decoder:
    """Latent attention everywhere; the first layers have a plain MLP, the others experts."""

    def make(_: int, name: str) -> Layer:
        mlp = gated_mlp(spec, shard, load, f"{name}.mlp")
        return layer(spec, load, name, LatentAttention(spec, shard, load, f"{name}.self_attn"), mlp)

    return Decoder(spec, shard, load, make)
