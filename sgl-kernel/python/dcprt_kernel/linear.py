"""Matrix products, and the instruction set that all kernels use.

`DCPRT_KERNEL_ISA` names the instruction set; without it, it is the best one of the processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PANEL",
    "code",
    "coded_room",
    "forced_isa",
    "heads",
    "isa_in_use",
    "linear",
    "pack",
    "packed_shape",
    "possible_isas",
    "rows",
]

_linear = _LIBRARY.linear
_heads = _LIBRARY.linear_heads
_pack = _LIBRARY.linear_pack
_code = _LIBRARY.linear_code
_rows = _LIBRARY.linear_rows

PANEL = 16
"""Outputs that lie side by side in a packed matrix."""

UNIT = 8
"""Inputs that are coded together."""

HEADER = 64
"""Bytes before the first unit of a coded matrix."""


def packed_shape(outs: int, ins: int, itemsize: int) -> tuple[int, int, int, int]:
    """Of a packed matrix: panels of outputs, steps of inputs, outputs of a panel, inputs of a step."""
    width = 4 // itemsize
    return -(-outs // PANEL), -(-ins // width), PANEL, width


def pack(weight: Tensor, packed: Tensor) -> None:
    """Writes weight [out, in], float32 or bfloat16, in the order that products read it.

    packed: contiguous, of `packed_shape` and the type of the weights.

    Raises:
        ValueError: shapes or types do not fit, or elements of a row are not dense.
    """
    _pack(weight, packed)


def coded_room(outs: int, ins: int) -> int:
    """The bytes that coding needs: a header and the packed matrix, its inputs rounded up to whole units."""
    return HEADER + math.prod(packed_shape(outs, -(-ins // UNIT) * UNIT, 2)) * 2


def code(weight: Tensor, coded: Tensor, threads: int = 1) -> int:
    """Writes weight [out, in], bfloat16, without loss in about three quarters of its bytes.

    Products and rows take `coded[:bytes]` like a packed matrix, with the same results to the last bit. The code is the
    same for any number of threads.

    coded: uint8 [>= coded_room(out, in)], contiguous, aligned to 8 bytes.

    Returns:
        The bytes used; 0 where coding would save less than an eighth, because the weights have too many exponents.

    Raises:
        ValueError: shapes or types do not fit, or elements of a row are not dense.
    """
    return int(_code(weight, coded, threads))


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, threads: int = 1) -> None:
    """`out = x @ weight.T + bias`; x: [rows, in], bias: [out], out: [rows, out] and contiguous.

    The matrix is packed or coded; each of the others is float32 or bfloat16. x is rounded to the type of the weights;
    sums are float32, in the order of the inputs whatever the number of rows, and are rounded once if `out` is bfloat16.

    Raises:
        ValueError: shapes do not fit, or elements of a row are not dense.
    """
    _linear(x, packed, bias, out, threads)


def heads(x: Tensor, packed: Tensor, out: Tensor, threads: int = 1) -> None:
    """`out[:, h] = x[:, h] @ weight[h].T`, as `linear` computes it; x: [rows, heads, in], out: [rows, heads, out].

    packed: [heads, *packed_shape], contiguous, each as `pack` writes it. The elements of a head are dense.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _heads(x, packed, out, threads)


def rows(packed: Tensor, outs: int, ids: Tensor, out: Tensor) -> None:
    """`out = weight[ids]` in float32 [ids, in], contiguous; ids: int64. Zeros where an id is not in [0, outs).

    Raises:
        ValueError: shapes or types do not fit.
    """
    _rows(packed, outs, ids, out)


def possible_isas() -> tuple[str, ...]:
    """What this processor can run, slowest first."""
    return tuple(_LIBRARY.isa_possible().split())


def isa_in_use() -> str:
    """The instruction set of this process.

    Raises:
        ValueError: `DCPRT_KERNEL_ISA` names one that this processor cannot run.
    """
    return str(_LIBRARY.isa_in_use())


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Another instruction set meanwhile, in the whole process; for tests and benchmarks.

    Raises:
        ValueError: this processor cannot run it.
    """
    before = isa_in_use()
    _LIBRARY.isa_select(name)
    try:
        yield
    finally:
        _LIBRARY.isa_select(before)


isa_in_use()
