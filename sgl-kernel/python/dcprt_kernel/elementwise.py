"""What lies between the matrix products, of float32 or bfloat16; computed in float32, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["argmax", "rms_norm", "rotate", "silu_mul"]

_rms_norm = _LIBRARY.rms_norm
_silu_mul = _LIBRARY.silu_mul
_rotate = _LIBRARY.rotate
_argmax = _LIBRARY.argmax


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, add: Tensor | None = None, threads: int = 1) -> None:
    """`out = x / rms(x) * weight`, row by row; x and out: [rows, n], weight: [n].

    `add` is added to x before, in place; both are float32 and contiguous then.

    Raises:
        ValueError: shapes or types do not fit, or elements of a row are not dense.
    """
    _rms_norm(x, add, weight, eps, out, threads)


def silu_mul(x: Tensor, out: Tensor, threads: int = 1) -> None:
    """`out = silu(x[:, :n]) * x[:, n:]`; x: [rows, 2 * n], out: [rows, n] of the same type.

    Raises:
        ValueError: shapes or types do not fit, or elements of a row are not dense.
    """
    _silu_mul(x, out, threads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, threads: int = 1) -> None:
    """Turns the pairs (i, half + i) of every head in place; x: [tokens, heads, dim], cos and sin: float32
    [tokens, half].

    x may be a part of a larger tensor, as long as the elements of a head are dense. Dimensions from 2 * half on stay.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _rotate(x, cos, sin, threads)


def argmax(x: Tensor, places: Tensor, values: Tensor, threads: int = 1) -> None:
    """The first greatest element of each row of float32 [rows, n]: int64 `places` and float32 `values`, both [rows].

    A NaN counts as greater than anything else.

    Raises:
        ValueError: shapes or types do not fit, or n is 0.
    """
    _argmax(x, places, values, threads)
