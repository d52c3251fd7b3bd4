"""All layers as one native call, where one rank holds the whole model and nothing happens between the products."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dcprt.attention.native_backend import NativeBackend
from dcprt.kv.pool import KVPool
from dcprt.layers.mlp import GatedMLP
from dcprt.models.base import StepInput
from dcprt.models.decoder import Angles, GQAttention, Layer
from dcprt.ops import LayerWeights, WholeLayers
from dcprt_kernel.attention import MULTIPLE


class NativeLayers:
    """Does what the `Layer`s of a model do, one after the other."""

    def __init__(self, layers: WholeLayers, attention: GQAttention, backend: NativeBackend) -> None:
        self._layers = layers
        self._backend = backend
        self._q_to_kv = attention.attend.heads.q_to_kv
        self._scale = attention.attend.scale

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> NativeLayers | None:
        """The same layers, or None if one has something that the native call does not know, or is of another shape."""
        found = [_weights(layer) for layer in layers]
        weights = [layer for layer in found if layer is not None]
        if len(weights) < len(found) or len({_shape(layer) for layer in layers}) != 1:
            return None
        attention = layers[0].attention
        assert isinstance(attention, GQAttention) and isinstance(attention.attend.fused, NativeBackend)
        return cls(WholeLayers(weights, layers[0].norm1.eps), attention, attention.attend.fused)

    def __call__(self, x: Tensor, angles: Angles, step: StepInput, kv: KVPool) -> Tensor:
        """What is to be added to the residual x in the end, see `Layer`."""
        plan = step.attention
        tables = self._backend.head_map(self._q_to_kv), *self._backend.table(plan.rows)
        stores = plan.store_tokens, plan.store_slots
        return self._layers(x, angles, kv.pairs, stores, tables, self._scale)


def _weights(layer: Layer) -> LayerWeights | None:
    """What the native call needs of a layer, or None if it does not know all of it."""
    attention, mlp = layer.attention, layer.mlp
    if not (isinstance(attention, GQAttention) and isinstance(mlp, GatedMLP)):
        return None
    if not isinstance(attention.attend.fused, NativeBackend) or attention.norms or attention.out.bias is not None:
        return None
    matrices = attention.qkv, attention.out.matrix, mlp.gate_up, mlp.down.matrix
    fits = WholeLayers.possible(*matrices) and attention.head_dim % MULTIPLE == 0
    if not fits or mlp.down.bias is not None or layer.norm1.eps != layer.norm2.eps:
        return None
    return LayerWeights(layer.norm1.weight, layer.norm2.weight, *matrices)


def _shape(layer: Layer) -> tuple[object, ...]:
    """What layers of one call have in common."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, GQAttention) and isinstance(mlp, GatedMLP)
    heads = attention.attend.heads.q_to_kv, attention.head_dim, attention.attend.scale
    return *heads, layer.norm1.eps, attention.qkv.shape, mlp.gate_up.shape, mlp.down.matrix.shape
