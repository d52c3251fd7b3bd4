"""Tensor sources over another one: names changed, block scales multiplied in."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dcprt.errors import ModelError
from dcprt.weights.checkpoint import TensorSource

SCALE = "_scale_inv"
"""What a weight's name is followed by in the name of its scales."""


class Renamed:
    """`rules` are (beginning of a stored name, what stands in its place); the first that fits is applied."""

    def __init__(self, source: TensorSource, rules: Sequence[tuple[str, str]]) -> None:
        self._source = source
        self._stored = {_renamed(name, rules): name for name in source.names}

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        return self._source.shape(self._stored.get(name, name), expected)

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, at: int | None = None) -> Tensor:
        """See `TensorSource`."""
        return self._source.read(self._stored[name], rows, cols, at)


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for start, instead in rules:
        if name.startswith(start):
            return instead + name.removeprefix(start)
    return name


class BlockScaled:
    """e4m3 weights with one float32 scale per block of rows and columns (DeepSeek-V3 technical report, 2024).

    A weight is the stored value times the scale of its block, whose tensor has the name of the weight and `_scale_inv`.
    Blocks at the ends may be cut. Tensors of other types pass. The scales are no tensors of this source.
    """

    def __init__(self, source: TensorSource, block: Sequence[int]) -> None:
        self._source = source
        self._block = block
        self._names = {
            name for name in source.names if name.removesuffix(SCALE) not in source.names or not name.endswith(SCALE)
        }

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        return self._source.shape(name, expected)

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, at: int | None = None) -> Tensor:
        """See `TensorSource`; float32 where the stored tensor is e4m3. Reads only the scales of the slice.

        Raises:
            ModelError: a weight has no scales, or they have another shape than its blocks.
        """
        part = self._source.read(name, rows, cols, at)
        if part.dtype != torch.float8_e4m3fn:
            return part
        height, width = self._check_scales(name)
        blocks, inside = zip(
            *(
                _blocks(cut, size, block)
                for cut, size, block in zip((rows, cols), (height, width), self._block, strict=True)
            ),
            strict=True,
        )
        scale = self._source.read(name + SCALE, blocks[0], blocks[1], at).float()
        return part.float() * scale[inside[0]][:, inside[1]]

    def _check_scales(self, name: str) -> tuple[int, int]:
        """Rows and columns of a weight whose scales fit."""
        shape = self._source.shape(name, ())
        assert shape is not None, name
        if len(shape) < 2:
            raise ModelError(f"Tensor {name} is float8_e4m3fn with shape {shape}; only matrices have scales.")
        height, width = shape[-2:]
        wanted = (*shape[:-2], -(-height // self._block[0]), -(-width // self._block[1]))
        found = self._source.shape(name + SCALE, wanted)
        if found is None:
            raise ModelError(f"Tensor {name} is float8_e4m3fn, but the checkpoint has no tensor {name + SCALE}.")
        if found != wanted:
            raise ModelError(
                f"Tensor {name + SCALE} has shape {found} in the checkpoint, but must have {wanted} "
                f"for {name} of shape {shape} in blocks of {' x '.join(map(str, self._block))}."
            )
        return height, width


def _blocks(cut: slice | None, size: int, block: int) -> tuple[slice, Tensor]:
    """The blocks that a slice touches, and for each place of it the block, counted from the first of these."""
    start, stop, _ = (cut or slice(None)).indices(size)
    first = start // block
    return slice(first, max(first, -(-stop // block))), torch.arange(start, stop) // block - first
