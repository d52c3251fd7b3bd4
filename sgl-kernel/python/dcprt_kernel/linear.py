"""Matrix products with few rows, and the instruction set that all kernels use.

`DCPRT_KERNEL_ISA` names the instruction set; without it, it is the best one of the processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["forced_isa", "isa_in_use", "linear", "possible_isas"]

_linear = _LIBRARY.linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, threads: int = 1) -> None:
    """`out = x @ weight.T + bias`; x: [rows, in], weight: [out, in], bias: [out], out: [rows, out] and contiguous.

    Each is float32 or bfloat16. x is rounded to the type of the weights; sums are float32, and are rounded once if
    `out` is bfloat16. The weights are read once for all rows, which pays for few of them.

    Raises:
        ValueError: shapes do not fit, or elements of a row are not dense.
    """
    _linear(x, weight, bias, out, threads)


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
