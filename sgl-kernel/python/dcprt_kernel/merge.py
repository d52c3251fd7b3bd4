"""Partial attention results, out float32 [tokens, heads, dim] and lse float32 [tokens, heads].

Everything is contiguous. Merging is in float32; what a part without weight holds is not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["merge", "merge_packed", "pack"]

_merge = _LIBRARY.merge
_merge_packed = _LIBRARY.merge_packed
_pack = _LIBRARY.merge_pack


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor, threads: int = 1
) -> None:
    """Attention over the keys of both, to `out` and `lse`.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _merge(out_a, lse_a, out_b, lse_b, out, lse, threads)


def merge_packed(packed: Tensor, out: Tensor, lse: Tensor, threads: int = 1) -> None:
    """Attention over the keys of all of packed [parts, tokens, heads, dim + 1], the lse last.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _merge_packed(packed, out, lse, threads)


def pack(out: Tensor, lse: Tensor, packed: Tensor) -> None:
    """To packed [ranks, tokens, heads / ranks, dim + 1], the lse last.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _pack(out, lse, packed)
