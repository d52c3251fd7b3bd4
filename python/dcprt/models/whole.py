"""All layers as one native call, with the sums and exchanges between them, where ranks meet in shared memory.

Where steps are profiled, the parts of the layers are objects that record (`dcprt.trace`). The call does what these
stand for, notes when each part ends, and tells the recorder.
"""

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
from dcprt.ops import LAYER_PARTS, LayerHeads, LayerWeights, WholeLayers
from dcprt.trace import Part, Recorder, untraced
from dcprt_kernel.attention import MULTIPLE


class Spans:
    """What a trace shows of native calls: their layers, and the parts of each. `world` and `dcp` are groups or none."""

    def __init__(self, recorder: Recorder, world: Collective | None, dcp: Collective | None) -> None:
        self._recorder = recorder
        context = Part.CONTEXT_AND_NEW_TOKENS if dcp is None else Part.CONTEXT
        summed = Part.ADD_BIAS if world is None else Part.collective("all_reduce", "world")
        names = {
            "projected": Part.NORM_AND_LINEAR,
            "stored": Part.ROTATE_AND_STORE,
            "gathered": Part.collective("all_gather", "dcp"),
            "attended": context,
            "exchanged": Part.collective("all_to_all", "dcp"),
            "merged": Part.MERGE,
            "output": Part.LINEAR,
            "output summed": summed,
            "gated": Part.NORM_AND_MLP,
            "gated summed": summed,
        }
        self._names = [names[part] for part in LAYER_PARTS[1:]]

    def record(self, layers: list[list[int]]) -> None:
        """Of one call, from when the parts of its layers ended; 0 for a part that there is not."""
        for i, (begin, *ends) in enumerate(layers):
            at = begin
            for name, end in zip(self._names, ends, strict=True):
                if end:
                    self._recorder.add(name, at, end)
                    at = end
            self._recorder.add(f"layer {i}", begin, at)


class NativeLayers:
    """Does what the `Layer`s of a model do, one after the other."""

    def __init__(
        self, layers: WholeLayers, attend: DcpAttention, backend: NativeBackend, spans: Spans | None = None
    ) -> None:
        self._layers = layers
        self._attend = attend
        self._backend = backend
        self._spans = spans

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
        assert isinstance(attention, GQAttention)
        attend, (backend, recorder) = attention.attend, untraced(attention.attend.backend)
        assert isinstance(backend, NativeBackend)
        groups = [untraced(group)[0] for group in (world, attend.group)]
        shared = [group for group in groups if isinstance(group, ShmCollective)]
        if any(group.size > 1 and group not in shared for group in groups):
            return None
        met = [group if group in shared else None for group in groups]
        spans = None if recorder is None else Spans(recorder, *met)
        heads = LayerHeads(_kv_head_of(attend), attention.projected, attend.scale)
        return cls(WholeLayers(weights, layers[0].norm1.eps, heads, *met), attend, backend, spans)

    def take(self, step: StepInput) -> bool:
        """Whether the call knows how to do this step; every rank answers alike."""
        return self._attend.is_one_pass(step.attention)

    def __call__(self, x: Tensor, angles: Angles, step: StepInput, kv: KVPool) -> Tensor:
        """What is to be added to the residual x in the end, see `Layer`."""
        plan = step.attention
        stores, tables = (plan.store_tokens, plan.store_slots), self._backend.table(plan.rows)
        if self._spans is None:
            return self._layers(x, angles, kv.pairs, stores, tables)
        ends = torch.zeros(len(kv.pairs), len(LAYER_PARTS), dtype=torch.int64)
        out = self._layers(x, angles, kv.pairs, stores, tables, ends)
        self._spans.record(ends.tolist())
        return out


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
    if not isinstance(untraced(attention.attend.backend)[0], NativeBackend) or attention.head_dim % MULTIPLE:
        return None
    traced = attention.qkv, attention.out.matrix, mlp.gate_up, mlp.down.matrix
    qkv, out, gate_up, down = matrices = [untraced(matrix)[0] for matrix in traced]
    norms = [layer.norm1, layer.norm2, *attention.norms]
    if not WholeLayers.possible(*matrices) or len({norm.eps for norm in norms}) != 1:
        return None
    first, second, *of_heads = [norm.weight for norm in norms]
    head_norms = (of_heads[0], of_heads[1]) if of_heads else None
    return LayerWeights((first, second), head_norms, qkv, out, gate_up, down, attention.out.bias, mlp.down.bias)


def _shape(layer: Layer) -> tuple[object, ...]:
    """What layers of one call have in common."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, GQAttention) and isinstance(mlp, GatedMLP)
    heads = attention.attend.heads.q_to_kv, attention.head_dim, attention.attend.scale
    return *heads, layer.norm1.eps, attention.qkv.shape, mlp.gate_up.shape, mlp.down.matrix.shape
