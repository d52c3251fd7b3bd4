"""All layers as one native call, with the sums and exchanges between them, where ranks meet in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcprt.attention.dcp import DcpAttention
from dcprt.attention.native_backend import NativeBackend
from dcprt.comm.protocol import Collective
from dcprt.comm.shm import ShmCollective
from dcprt.kv.pool import KVPool
from dcprt.layers.mlp import GatedMLP
from dcprt.models.base import StepInput
from dcprt.models.decoder import Angles, GQAttention, Layer
from dcprt.ops import LayerHeads, LayerWeights, WholeLayers
from dcprt_kernel.attention import MULTIPLE


class NativeLayers:
    """Does what the `Layer`s of a model do, one after the other."""

    def __init__(self, layers: WholeLayers, attend: DcpAttention, backend: NativeBackend) -> None:
        self._layers = layers
        self._attend = attend
        self._backend = backend

    @classmethod
    def of(cls, layers: Sequence[Layer], world: Collective) -> NativeLayers | None:
        """The same layers, or None if one has something that the native call does not know, or is of another shape, or
        if ranks do not meet in shared memory.
        """
        found = [_weights(layer) for layer in layers]
        weights = [layer for layer in found if layer is not None]
        if len(weights) < len(found) or len({_shape(layer) for layer in layers}) != 1:
            return None
        attention = layers[0].attention
        assert isinstance(attention, GQAttention) and isinstance(attention.attend.backend, NativeBackend)
        attend, groups = attention.attend, [world, attention.attend.group]
        shared = [group for group in groups if isinstance(group, ShmCollective)]
        if any(group.size > 1 and group not in shared for group in groups):
            return None
        met = [group if group in shared else None for group in groups]
        heads = LayerHeads(_kv_head_of(attend), attention.projected, attend.scale)
        return cls(WholeLayers(weights, layers[0].norm1.eps, heads, *met), attend, attention.attend.backend)

    def take(self, step: StepInput) -> bool:
        """Whether the call knows how to do this step; every rank answers alike."""
        return self._attend.is_one_pass(step.attention)

    def __call__(self, x: Tensor, angles: Angles, step: StepInput, kv: KVPool) -> Tensor:
        """What is to be added to the residual x in the end, see `Layer`."""
        plan = step.attention
        return self._layers(x, angles, kv.pairs, (plan.store_tokens, plan.store_slots), self._backend.table(plan.rows))


def _kv_head_of(attend: DcpAttention) -> Tensor:
    """The KV head of every query head that the pass over the cache sees."""
    if attend.group.size == 1:
        return torch.tensor(attend.heads.q_to_kv)
    queries = len(attend.heads.shard_q_heads)
    return torch.arange(queries) // (queries // len(attend.heads.kv_heads))


def _weights(layer: Layer) -> LayerWeights | None:
    """What the native call needs of a layer, or None if it does not know all of it."""
    attention, mlp = layer.attention, layer.mlp
    if not (isinstance(attention, GQAttention) and isinstance(mlp, GatedMLP)):
        return None
    if not isinstance(attention.attend.backend, NativeBackend) or attention.head_dim % MULTIPLE:
        return None
    matrices = attention.qkv, attention.out.matrix, mlp.gate_up, mlp.down.matrix
    norms = [layer.norm1, layer.norm2, *attention.norms]
    if not WholeLayers.possible(*matrices) or len({norm.eps for norm in norms}) != 1:
        return None
    first, second, *of_heads = [norm.weight for norm in norms]
    head_norms = (of_heads[0], of_heads[1]) if of_heads else None
    return LayerWeights((first, second), head_norms, *matrices, attention.out.bias, mlp.down.bias)


def _shape(layer: Layer) -> tuple[object, ...]:
    """What layers of one call have in common."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, GQAttention) and isinstance(mlp, GatedMLP)
    heads = attention.attend.heads.q_to_kv, attention.head_dim, attention.attend.scale
    return *heads, layer.norm1.eps, attention.qkv.shape, mlp.gate_up.shape, mlp.down.matrix.shape
