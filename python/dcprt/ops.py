"""Operators of a decoder: native where `dcprt_kernel` is installed, else on torch."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from dcprt.comm.shm import ShmCollective

INTERFACE = 7
"""Of the kernels; others would compute nonsense."""

try:
    import dcprt_kernel
    import dcprt_kernel.elementwise as _elementwise
    import dcprt_kernel.fused as _fused
    import dcprt_kernel.layer as _layer
    import dcprt_kernel.linear as _linear
    import dcprt_kernel.merge as _merge
    import dcprt_kernel.pages as _pages
    import dcprt_kernel.sampling as _sampling
except ImportError:
    NATIVE = False
else:
    NATIVE = True
    if getattr(dcprt_kernel, "INTERFACE", 1) != INTERFACE:
        raise RuntimeError(
            f"dcprt_kernel has interface {getattr(dcprt_kernel, 'INTERFACE', 1)}, dcprt needs {INTERFACE}: build both "
            "from the same sources, with `make install`."
        )

BLOCK = 4096
"""Vocabulary rows widened at a time: small enough to stay in the cache between the widening and the product."""

PACKED_TYPES = (torch.float32, torch.bfloat16)


class Arena:
    """Memory for weights, one tensor behind the other in huge pages, so that reading them seldom waits for an address.

    It lives as long as any tensor in it.
    """

    CHUNK = 32 << 20
    HUGE = 2 << 20

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)
        self._at = self._size = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, aligned to 64 bytes."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = -(-count * dtype.itemsize // 64) * 64
        if self._at + size > self._size:
            self._size = -(-max(size, self.CHUNK) // self.HUGE) * self.HUGE
            self._memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._at = 0
        found = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._at)
        self._at += size
        return found.view(shape)

    def trim(self, last: Tensor, count: int) -> Tensor:
        """The first elements of the tensor that was made last, one of one dimension; what lies behind is free again."""
        self._at -= (-(-last.nbytes // 64) - -(-count * last.itemsize // 64)) * 64
        return last[:count]


class Matrix:
    """Weights [out, in] and a bias [out] or none: a product's other factor.

    Natively they are packed once, and the product is summed in float32, in the order of the inputs whatever the number
    of rows. The weights given are not kept then. Large bfloat16 ones are coded too, which changes no bit of a result.
    """

    CODED_BYTES = 128 << 10
    """From which on a matrix is coded: smaller ones stay in a cache."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, arena: Arena | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self._bias = bias
        self._packed = NATIVE and weight.is_cpu and weight.dtype in PACKED_TYPES
        self._data = weight
        if self._packed:
            weight = weight if weight.stride(1) == 1 else weight.contiguous()
            coded = self._coded(weight, arena)
            self._data = self._plain(weight, arena) if coded is None else coded

    @staticmethod
    def _plain(weight: Tensor, arena: Arena | None) -> Tensor:
        shape = _linear.packed_shape(weight.shape[0], weight.shape[1], weight.itemsize)
        data = arena.empty(shape, weight.dtype) if arena else weight.new_empty(shape)
        _linear.pack(weight, data)
        return data

    @classmethod
    def _coded(cls, weight: Tensor, arena: Arena | None) -> Tensor | None:
        if weight.dtype != torch.bfloat16 or weight.nbytes < cls.CODED_BYTES or _linear.isa_in_use() == "generic":
            return None
        shape = (_linear.coded_room(weight.shape[0], weight.shape[1]),)
        room = arena.empty(shape, torch.uint8) if arena else torch.empty(shape, dtype=torch.uint8)
        used = _linear.code(weight, room, torch.get_num_threads())
        coded = arena.trim(room, used) if arena else room[:used].clone()
        return coded if used else None

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """`x @ weight.T + bias` of [rows, in], in `out_dtype` or else the type of the weights."""
        if self._packed and x.is_cpu:
            out = torch.empty((x.shape[0], self.shape[0]), dtype=out_dtype or self.dtype)
            _linear.linear(x, self._data, self._bias, out, torch.get_num_threads())
            return out
        return self._by_torch(x.to(self.dtype), out_dtype or self.dtype, self._bias)

    def _by_torch(self, x: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        if out_dtype == torch.float32 and self.dtype != torch.float32:
            return _wide_linear(x, self._data, bias)
        return _torch_linear(x, self._data, bias).to(out_dtype)

    def normed(self, x: Tensor, add: Tensor | None, norm: Tensor, eps: float) -> Tensor:
        """The product with `rms_norm(x + add)`, in the type of the weights; x, float32 [rows, in], becomes the sum."""
        if not (self._packed and x.is_cpu):
            return self(add_rms_norm(x, add, norm, eps))
        out = torch.empty((x.shape[0], self.shape[0]), dtype=self.dtype)
        _fused.norm_linear(x, add, norm, eps, self._data, self._bias, out, torch.get_num_threads())
        return out

    def gated(self, x: Tensor, add: Tensor | None, norm: Tensor, eps: float, down: Matrix) -> Tensor:
        """`down` of `silu(gate) * up`, where these are the halves of `normed`: gate's outputs first.

        Returns float32 [rows, outs of down], without the bias of `down`.
        """
        if not (self._packed and down._packed and x.is_cpu):
            return down._by_torch(silu_mul(self.normed(x, add, norm, eps)), torch.float32, None)
        out, width = torch.empty(x.shape[0], down.shape[0]), down.shape[1]
        matrices = self._data, self._bias, down._data
        _fused.norm_gated_mlp(x, add, norm, eps, *matrices, width, out, torch.get_num_threads())
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """`weight[ids]`, float32 [ids, in]; zeros where an id is outside of the matrix. ids: int64."""
        if self._packed and ids.is_cpu:
            out = torch.empty(len(ids), self.shape[1])
            _linear.rows(self._data, self.shape[0], ids, out)
            return out
        inside = (ids >= 0) & (ids < self.shape[0])
        return torch.where(inside.unsqueeze(-1), self._data[torch.where(inside, ids, 0)].float(), 0.0)


class HeadMatrix:
    """Weights [heads, out, in]: a product for each head, as `Matrix` computes it."""

    def __init__(self, weight: Tensor, arena: Arena | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.dtype = weight.dtype
        self._packed = NATIVE and weight.is_cpu and weight.dtype in PACKED_TYPES
        self._data = weight
        if self._packed:
            heads, outs, ins = weight.shape
            shape = (heads, *_linear.packed_shape(outs, ins, weight.itemsize))
            self._data = arena.empty(shape, weight.dtype) if arena else weight.new_empty(shape)
            for one, data in zip(weight, self._data, strict=True):
                _linear.pack(one if one.stride(1) == 1 else one.contiguous(), data)

    def __call__(self, x: Tensor, out: Tensor, heads: slice = slice(None)) -> None:
        """Writes `x[:, h] @ weight[h].T` of [rows, heads, in] to `out`, [rows, heads, out] of either type.

        `heads`: of which heads x and out are.
        """
        if self._packed and x.is_cpu:
            _linear.heads(x, self._data[heads], out, torch.get_num_threads())
        else:
            out.copy_(torch.einsum("rhi,hoi->rho", x.to(self.dtype), self._data[heads]))


class LayerWeights(NamedTuple):
    """Of a decoder layer of the Llama kind: two norms [hidden], those of query and key heads [head_dim] or none, and
    the biases that are added once `out` and `down` are summed over the ranks.
    """

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    out_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def tensors(self) -> list[Tensor]:
        """As the kernels take them."""
        none = torch.empty(0, dtype=self.norms[0].dtype)
        q_norm, k_norm = self.head_norms or (none, none)
        found: dict[str, Tensor | None] = {
            "norm1": self.norms[0],
            "norm2": self.norms[1],
            "q_norm": q_norm,
            "k_norm": k_norm,
            "qkv": self.qkv._data,
            "qkv_bias": self.qkv._bias,
            "o": self.out._data,
            "o_bias": self.out_bias,
            "gate_up": self.gate_up._data,
            "gate_up_bias": self.gate_up._bias,
            "down": self.down._data,
            "down_bias": self.down_bias,
        }
        parts = (found[name] for name in _layer.WEIGHTS)
        return [none if part is None else part for part in parts]


LAYER_PARTS = _layer.PARTS if NATIVE else ()
"""Of a decoder layer in a native call, in their order; see `dcprt_kernel.layer`."""


class LayerHeads(NamedTuple):
    """Heads of a decoder layer: the KV head of every query head (int64), how many of these `qkv` makes, and what scores
    are multiplied with.
    """

    kv_head_of: Tensor
    projected: int
    scale: float


class WholeLayers:
    """The weights of the decoder layers of a model, and all of them in one native call.

    There is one where every matrix is packed. `world` and `dcp` are the groups of more than one rank; see
    `dcprt_kernel.layer`.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        eps: float,
        heads: LayerHeads,
        world: ShmCollective | None = None,
        dcp: ShmCollective | None = None,
    ) -> None:
        assert all(self.possible(*layer.matrices) for layer in layers)
        self._weights = dcprt_kernel.held([tensor for layer in layers for tensor in layer.tensors()])
        self._width, self._eps, self._heads = layers[0].down.shape[1], eps, heads
        self._groups = {_layer.WORLD: world, _layer.DCP: dcp}
        self._no_ends = torch.empty(0, dtype=torch.int64)
        self._pools: tuple[Sequence[tuple[Tensor, Tensor]], _layer.Layers] | None = None

    @staticmethod
    def possible(*matrices: Matrix) -> bool:
        """Whether the kernels have these matrices."""
        return all(matrix._packed for matrix in matrices)

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        pools: Sequence[tuple[Tensor, Tensor]],
        stores: tuple[Tensor, Tensor],
        tables: tuple[Tensor, Tensor],
        ends: Tensor | None = None,
    ) -> Tensor:
        """What is to be added to x, float32 [tokens, hidden], in the end; x becomes the sum up to there.

        ends: int64 [layers, len(LAYER_PARTS)], gets when each of these ended, on the clock of `dcprt.trace`, but of
        those that a layer does not have. pools: keys and values of each layer; the same object at every call, or it is
        taken apart anew. stores: tokens and the slots they go to. tables: rows and pages, see
        `dcprt_kernel.attention`.

        Raises:
            CollectiveTimeout, CollectiveError: an operation between the ranks failed.
        """
        world, dcp = (None if group is None else group.lend() for group in self._groups.values())
        if self._pools is None or self._pools[0] is not pools:
            held = dcprt_kernel.held([pool for pair in pools for pool in pair])
            limit = max((group.timeout_s for group in self._groups.values() if group is not None), default=0.0)
            about = self._eps, self._width, *self._heads
            self._pools = pools, _layer.decoder_layers(self._weights, held, *about, world, dcp, limit)
        out, ends = torch.empty_like(x), self._no_ends if ends is None else ends
        failed = self._pools[1](x, *angles, *stores, *tables, out, ends, torch.get_num_threads())
        if failed:
            group = self._groups[failed]
            assert group is not None
            group.raise_lent()
        return out


def bucket(rows: int) -> int:
    """The number of rows that `rows` are padded to: at most a quarter more, four different ones between powers of 2."""
    if rows <= 16:
        return rows
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in float32, in the type of `weight`."""
    if not (NATIVE and x.is_cpu):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(weight.dtype)
    out = torch.empty(x.shape, dtype=weight.dtype)
    n = x.shape[-1]
    _elementwise.rms_norm(x.reshape(-1, n), weight, eps, out.view(-1, n), None, torch.get_num_threads())
    return out


def add_rms_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of `x + add`, which x becomes. x and add: float32 [rows, n], contiguous."""
    if not (NATIVE and x.is_cpu):
        return rms_norm(x if add is None else x.add_(add), weight, eps)
    out = torch.empty(x.shape, dtype=weight.dtype)
    _elementwise.rms_norm(x, weight, eps, out, add, torch.get_num_threads())
    return out


def silu_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of [rows, 2 * n], gate first."""
    rows, width = x.shape
    if not (NATIVE and x.is_cpu):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    out = torch.empty((rows, width // 2), dtype=x.dtype)
    _elementwise.silu_mul(x, out, torch.get_num_threads())
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, half + i) of every head in place; x: [tokens, heads, dim], cos and sin: [tokens, 1, half].

    Dimensions from 2 * half on stay. Returns x.
    """
    if NATIVE and x.is_cpu:
        _elementwise.rotate(x, cos, sin, torch.get_num_threads())
        return x
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    x[..., : 2 * half] = turned
    return x


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Places (int64) and values of the greatest of each row of float32 [rows, n]; a NaN counts as the greatest."""
    if not (NATIVE and x.is_cpu):
        best = x.max(-1)
        return best.indices, best.values
    rows = x.shape[0]
    places, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    _elementwise.argmax(x, places, values, torch.get_num_threads())
    return places, values


def store(pool: Tensor, rows: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """Rows `tokens` of [tokens, heads, dim] to `slots` of a pool [pages, page_size, heads, dim]; both int64."""
    if NATIVE and rows.is_cpu and rows.dtype == pool.dtype and rows.stride(2) == 1:
        _pages.store(rows, tokens, slots, pool)
    elif len(tokens):
        pool.flatten(0, 1)[slots] = rows[tokens].to(pool.dtype)


class PageCopies:
    """Copies pages in several pools [pages, page_size, ...] at once, contiguous ones."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._pools = pools
        native = NATIVE and all(pool.is_cpu and pool.dtype in PACKED_TYPES for pool in pools)
        self._held = dcprt_kernel.held(pools) if native else None

    def __call__(self, source: int, target: int, count: int) -> None:
        """The first `count` slots of page `source` to page `target`."""
        if self._held is not None:
            _pages.copy(self._held, source, target, count)
            return
        for pool in self._pools:
            pool[target, :count] = pool[source, :count]


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, drawn: float) -> int:
    """The token at `drawn`, in [0, 1), of the cumulative distribution over logits [vocab], likeliest first.

    Temperature, then the `top_k` best (0: all), then those with at least `min_p` times the weight of the best, then the
    fewest that hold `top_p` of the rest.
    """
    if NATIVE and logits.is_cpu:
        return _sampling.draw(logits, temperature, top_k, top_p, min_p, drawn)
    scaled = logits / temperature
    values, order = scaled.sort(descending=True, stable=True)
    weights = (values.double() - values[0]).exp()
    if top_k:
        weights = weights[:top_k]
    if min_p > 0:
        weights = weights[: int((weights >= min_p).sum())]
    cumulative = weights.cumsum(0)
    if top_p < 1:
        cumulative = cumulative[: int(torch.searchsorted(cumulative, top_p * cumulative[-1])) + 1]
    index = int(torch.searchsorted(cumulative, drawn * cumulative[-1], right=True))
    return int(order[min(index, len(cumulative) - 1)])


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results, contiguous: out [tokens, heads, dim] and lse [tokens, heads] over the keys of both."""
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    _merge.merge(out_a, lse_a, out_b, lse_b, out, lse, torch.get_num_threads())
    return out, lse


def pack_partial(out: Tensor, lse: Tensor, ranks: int) -> Tensor:
    """out [tokens, heads, dim] and lse [tokens, heads], contiguous, to [ranks, tokens, heads / ranks, dim + 1]."""
    tokens, heads, dim = out.shape
    packed = torch.empty(ranks, tokens, heads // ranks, dim + 1)
    _merge.pack(out, lse, packed)
    return packed


def merge_packed(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [parts, tokens, heads, dim + 1], lse last, to out and lse over the keys of all, in their order."""
    shape = packed.shape[1:3]
    out, lse = torch.empty(*shape, packed.shape[3] - 1), torch.empty(shape)
    _merge.merge_packed(packed, out, lse, torch.get_num_threads())
    return out, lse


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in float32, never rounded on the way."""
    wide = x.float()
    out = torch.cat([F.linear(wide, part.float()) for part in torch.split(weight, BLOCK)], dim=1)
    return out if bias is None else out + bias


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In bfloat16 it is oneDNN's, which makes and keeps a program of some 600 KiB for every number of rows it meets;
    steps have thousands of different ones, so rows are padded to a few.
    """
    rows = x.shape[0]
    if x.dtype != torch.bfloat16 or bucket(rows) == rows:
        return F.linear(x, weight, bias)
    padded = x.new_zeros(bucket(rows), x.shape[1])
    padded[:rows] = x
    return F.linear(padded, weight, bias)[:rows]
