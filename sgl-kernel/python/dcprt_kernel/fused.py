"""What stands between two sums over ranks, in one call: a norm and the products behind it.

x: float32 [rows, hidden], contiguous; `add`, likewise, is added to it in place first. norm: the norm's weight [hidden].
Matrices are packed, see `dcprt_kernel.linear`; they and norm are of one type, to which every step is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["norm_gated_mlp", "norm_linear"]

_norm_linear = _LIBRARY.norm_linear
_norm_gated_mlp = _LIBRARY.norm_gated_mlp


def norm_linear(
    x: Tensor,
    add: Tensor | None,
    norm: Tensor,
    eps: float,
    matrix: Tensor,
    bias: Tensor | None,
    out: Tensor,
    threads: int = 1,
) -> None:
    """`out = rms_norm(x + add) @ matrix.T + bias`; out: [rows, outs] in the type of the weights.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _norm_linear(x, add, norm, eps, matrix, bias, out, threads)


def norm_gated_mlp(
    x: Tensor,
    add: Tensor | None,
    norm: Tensor,
    eps: float,
    gate_up: Tensor,
    bias: Tensor | None,
    down: Tensor,
    width: int,
    out: Tensor,
    threads: int = 1,
) -> None:
    """`out = (silu(gate) * up) @ down.T`, gate and up the halves of `rms_norm(x + add) @ gate_up.T + bias`.

    width: of a half. out: float32 [rows, outs of down].

    Raises:
        ValueError: shapes or types do not fit.
    """
    _norm_gated_mlp(x, add, norm, eps, gate_up, bias, down, width, out, threads)
