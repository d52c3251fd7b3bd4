"""Reading a rank's share of each tensor, padded and in the model's type."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dcprt.errors import ModelError
from dcprt.ops import Arena, HeadMatrix, Matrix
from dcprt.weights.checkpoint import TensorSource

_Piece = tuple[int, int, int]


class Loader:
    """Reads shards of a checkpoint, checking each tensor's full shape.

    Every method takes the shape that the whole tensor must have. A result is a new contiguous tensor of
    `dtype`; memory holds it and one slice of the source. `progress` is called with the tensors read so far
    and the tensors of the checkpoint (0: not known).

    Raises:
        ModelError: from each reading method: the tensor is missing or has another shape; names both shapes.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._total = len(checkpoint.names)
        self._seen: set[str] = set()
        self._arena = Arena()

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """`weight` as products read it, beside the other weights of this rank; with a bias that is added there."""
        return Matrix(weight, bias, self._arena)

    def head_matrix(self, weight: Tensor) -> HeadMatrix:
        """The same for a product of each head; weight: [heads, out, in]."""
        return HeadMatrix(weight, self._arena)

    @property
    def dtype(self) -> torch.dtype:
        """The type of every result."""
        return self._dtype

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor; a source without a list of names says no."""
        return name in self._checkpoint.names

    def full(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor; of another type than the model's where `dtype` says so."""
        return self._gather(name, shape, 0, [(0, 0, shape[0])], shape[0], dtype=dtype)

    def rows(
        self, name: str, shape: Sequence[int], start: int, stop: int, padded: int, at: int | None = None
    ) -> Tensor:
        """Rows `start` to `stop`, then zeros: [padded, cols], or [padded] of a 1-D tensor.

        With `at`, those of matrix `at` of a 3-D tensor.
        """
        dim = 0 if at is None else 1
        return self._gather(name, shape, dim, self._range(shape, dim, start, stop, padded), padded, at)

    def cols(
        self, name: str, shape: Sequence[int], start: int, stop: int, padded: int, at: int | None = None
    ) -> Tensor:
        """Columns `start` to `stop`, then zeros: [rows, padded], or [padded] of a 1-D tensor. `at` as in `rows`."""
        dim = len(shape) - 1
        return self._gather(name, shape, dim, self._range(shape, dim, start, stop, padded), padded, at)

    def head_rows(self, name: str, shape: Sequence[int], heads: Sequence[int], head_dim: int) -> Tensor:
        """The rows of `heads`, in that order, zeros for -1: [len(heads) * head_dim, cols], or 1-D."""
        return self._gather(name, shape, 0, _head_pieces(heads, head_dim), len(heads) * head_dim)

    def head_cols(self, name: str, shape: Sequence[int], heads: Sequence[int], head_dim: int) -> Tensor:
        """The columns of `heads`, in that order, zeros for -1: [rows, len(heads) * head_dim], or 1-D."""
        return self._gather(name, shape, len(shape) - 1, _head_pieces(heads, head_dim), len(heads) * head_dim)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Check that the model used every tensor of the checkpoint.

        A share of zero rows counts as used, so this holds on every rank. `ignore` are names or patterns
        with `*` of tensors that may be left, such as `*.rotary_emb.inv_freq`.

        Raises:
            ModelError: tensors were left unread; names them.
        """
        patterns = list(ignore)
        left = sorted(
            name
            for name in set(self._checkpoint.names) - self._seen
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            names = ", ".join(left[:5])
            raise ModelError(f"The checkpoint has tensors that the model does not use: {names}{more}.")

    @staticmethod
    def _range(shape: Sequence[int], dim: int, start: int, stop: int, padded: int) -> list[_Piece]:
        assert 0 <= start <= stop <= shape[dim], (start, stop, tuple(shape))
        assert stop - start <= padded, (start, stop, padded)
        return [(0, start, stop)] if stop > start else []

    def _gather(
        self,
        name: str,
        shape: Sequence[int],
        dim: int,
        pieces: list[_Piece],
        size: int,
        at: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Copy pieces (place in the result, start, stop) along `dim`, which becomes `size` long.

        With `at`, the result lacks the first dimension, and only that place of it is read.
        """
        self._check(name, tuple(shape))
        outer = 0 if at is None else 1
        result_shape = list(shape[outer:])
        result_shape[dim - outer] = size
        covered = sum(stop - start for _, start, stop in pieces)
        make = torch.empty if covered == size else torch.zeros
        result = make(result_shape, dtype=dtype or self._dtype)
        for place, start, stop in pieces:
            assert 0 <= start < stop <= shape[dim], (name, start, stop, tuple(shape))
            cut = slice(start, stop)
            rows, cols = (cut, None) if dim == outer else (None, cut)
            part = self._checkpoint.read(name, rows, cols, at)
            result.narrow(dim - outer, place, stop - start).copy_(part)
        if name not in self._seen:
            self._seen.add(name)
            if self._progress is not None:
                self._progress(len(self._seen), self._total)
        return result

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        found = self._checkpoint.shape(name, expected)
        if found is None:
            raise ModelError(f"The checkpoint has no tensor {name} with shape {expected}.")
        if found != expected:
            raise ModelError(f"Tensor {name} has shape {found} in the checkpoint, but must have {expected}.")


def _head_pieces(heads: Sequence[int], head_dim: int) -> list[_Piece]:
    """One piece per run of consecutive heads, so that each is read in one slice."""
    pieces: list[_Piece] = []
    for place, head in enumerate(heads):
        if head < 0:
            continue
        target, start = place * head_dim, head * head_dim
        if pieces:
            last_target, last_start, last_stop = pieces[-1]
            if start == last_stop and target == last_target + last_stop - last_start:
                pieces[-1] = (last_target, last_start, start + head_dim)
                continue
        pieces.append((target, start, start + head_dim))
    return pieces
