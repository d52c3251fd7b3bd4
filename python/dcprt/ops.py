"""Operators of a decoder: native where `dcprt_kernel` is installed and its kernels are faster, else on torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import dcprt_kernel.elementwise as _elementwise
    import dcprt_kernel.linear as _linear
except ImportError:
    NATIVE = False
else:
    NATIVE = True

FEW_ROWS = {torch.bfloat16: 32, torch.float32: 64}
"""Rows up to which the native product is faster than torch's, by type of the weights."""

BLOCK = 4096
"""Vocabulary rows widened at a time: small enough to stay in the cache between the widening and the product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`x @ weight.T + bias` of [rows, in] and [out, in], in `out_dtype` or else the type of the weights.

    For few rows it is summed in float32 and rounded once, to `out_dtype`; for many, torch rounds to the weights' type.
    """
    if x.shape[0] <= FEW_ROWS.get(weight.dtype, 0) and _is_native(x, weight):
        return _native_linear(x, weight, bias, out_dtype or weight.dtype)
    out = _torch_linear(x, weight, bias)
    return out if out_dtype is None else out.to(out_dtype)


def bucket(rows: int) -> int:
    """The number of rows that `rows` are padded to: at most a quarter more, four different ones between powers of 2."""
    if rows <= 16:
        return rows
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of [rows, in] and [out, in] in float32, never rounded on the way, for any number of rows."""
    if weight.dtype in FEW_ROWS and _is_native(x, weight):
        parts = [_native_linear(part, weight, None, torch.float32) for part in torch.split(x, 64)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    wide = x.float()
    return torch.cat([F.linear(wide, part.float()) for part in torch.split(weight, BLOCK)], dim=1)


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


def add_rms_norm(x: Tensor, add: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of `x + add`, which x becomes. x and add: float32 [rows, n]."""
    if not (NATIVE and x.is_cpu):
        return rms_norm(x.add_(add), weight, eps)
    out = torch.empty(x.shape, dtype=weight.dtype)
    _elementwise.rms_norm(x, weight, eps, out, add.contiguous(), torch.get_num_threads())
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


def _is_native(x: Tensor, weight: Tensor) -> bool:
    return NATIVE and x.is_cpu and x.ndim == 2 and weight.stride(1) == 1 and x.stride(1) == 1


def _native_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    _linear.linear(x, weight, bias, out, torch.get_num_threads())
    return out


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
