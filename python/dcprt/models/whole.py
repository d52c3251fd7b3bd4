"""A layer as one native call, where one rank holds the whole model and nothing happens between the products."""

from __future__ import annotations

from torch import Tensor

from dcprt.attention.native_backend import NativeBackend
from dcprt.kv.pool import LayerKV
from dcprt.layers.mlp import GatedMLP
from dcprt.models.base import StepInput
from dcprt.models.decoder import Angles, GQAttention, Layer
from dcprt.ops import WholeLayer
from dcprt_kernel.attention import MULTIPLE


class NativeLayer:
    """Does what a `Layer` does."""

    def __init__(self, whole: WholeLayer, attention: GQAttention, backend: NativeBackend) -> None:
        self._whole = whole
        self._backend = backend
        self._q_to_kv = attention.attend.heads.q_to_kv
        self._scale = attention.attend.scale

    @classmethod
    def of(cls, layer: Layer) -> NativeLayer | None:
        """The same layer, or None if it has something that the native call does not know."""
        attention, mlp = layer.attention, layer.mlp
        if not (isinstance(attention, GQAttention) and isinstance(mlp, GatedMLP)):
            return None
        backend = attention.attend.fused
        if not isinstance(backend, NativeBackend) or attention.norms or attention.out.bias is not None:
            return None
        matrices = attention.qkv, attention.out.matrix, mlp.gate_up, mlp.down.matrix
        fits = WholeLayer.possible(*matrices) and attention.head_dim % MULTIPLE == 0
        if not fits or mlp.down.bias is not None or layer.norm1.eps != layer.norm2.eps:
            return None
        norms = layer.norm1.weight, layer.norm2.weight
        return cls(WholeLayer(norms, layer.norm1.eps, *matrices), attention, backend)

    def __call__(self, x: Tensor, add: Tensor | None, angles: Angles, step: StepInput, kv: LayerKV) -> Tensor:
        plan = step.attention
        tables = self._backend.head_map(self._q_to_kv), *self._backend.table(plan.rows)
        stores = plan.store_tokens, plan.store_slots
        return self._whole(x, add, angles, (kv.k, kv.v), stores, tables, self._scale)
