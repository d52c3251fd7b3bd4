"""Where weights come from: safetensors files, or random numbers in their place."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcprt.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class TensorSource(Protocol):
    """What a `Loader` reads from."""

    @property
    def names(self) -> Collection[str]:
        """Every tensor that is known to be there."""

    def shape(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a tensor, or None where there is no such tensor."""

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, at: int | None = None) -> Tensor:
        """`rows` of the first and `cols` of the second dimension, in the type it is stored in.

        `at` is the place in a dimension before these two, which the result does not have.
        """


class Checkpoint:
    """The safetensors files of a directory. They are mapped, and only what is asked for is read.

    The files are those that model.safetensors.index.json names, or model.safetensors, or all *.safetensors.
    With `fp8`, e4m3 tensors are read too; whoever reads them has to scale them.

    Raises:
        ModelError: no files, or a damaged one; names it.
    """

    def __init__(self, directory: Path, fp8: bool = False) -> None:
        self.directory = directory
        self._fp8 = fp8
        self._files: dict[str, Any] = {}
        self._home: dict[str, Path] = {}
        wanted, paths = self._find()
        for path in paths:
            file = self._open(path)
            names = file.keys()
            for name in names:
                if name in self._home:
                    raise ModelError(f"Tensor {name} is both in {self._home[name]} and in {path}.")
                self._home[name] = path
                self._files[name] = file
        missing = sorted(wanted - self._home.keys())
        if missing:
            index = directory / _INDEX
            raise ModelError(f"{index} names the tensor {missing[0]}, which is in none of its files.")

    @property
    def names(self) -> Collection[str]:
        """Every tensor in the files."""
        return self._home.keys()

    def shape(self, name: str, expected: tuple[int, ...] = ()) -> tuple[int, ...] | None:  # noqa: ARG002
        """The shape of a tensor, or None where there is no such tensor; `expected` is not used."""
        file = self._files.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, at: int | None = None) -> Tensor:
        """`rows` of the first and `cols` of the second dimension (None: all), in the type it is stored in.

        `at` is the place in a dimension before these two, which the result does not have. The result may share memory
        with the file's mapping.

        Raises:
            ModelError: the file cannot give the tensor.
        """
        index: tuple[slice | int, ...] = () if at is None else (at,)
        index += (rows or slice(None),) if cols is None else (rows or slice(None), cols)
        try:
            part: Tensor = self._files[name].get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._home[name]} is damaged: cannot read {name}: {error}") from error
        quantized = part.element_size() < 2 and not (self._fp8 and part.dtype == torch.float8_e4m3fn)
        if not part.is_floating_point() or quantized:
            raise ModelError(f"{self._home[name]}: tensor {name} has the type {part.dtype}, not supported.")
        return part

    def _find(self) -> tuple[set[str], list[Path]]:
        """Tensor names that must be there, and the files to look in."""
        index = self.directory / _INDEX
        if index.is_file():
            return self._read_index(index)
        single = self.directory / _SINGLE
        paths = [single] if single.is_file() else sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{self.directory} has no *.safetensors files.")
        return set(), paths

    def _read_index(self, index: Path) -> tuple[set[str], list[Path]]:
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(places.values()))
        except OSError as error:
            raise ModelError(f"Cannot read {index}: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is damaged: no JSON object with a weight_map.") from error
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{index} names {file!r}, which is no file beside it.")
        return set(places), [self.directory / file for file in files]

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise ModelError(f"{path} is missing.") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or no safetensors file: {error}") from error


class DummyCheckpoint:
    """Random weights of whatever shape is asked for; a value depends on seed, name and place only.

    Every rank therefore finds the same whole tensor behind its slice. Weights are drawn from N(0, 0.02),
    norm weights are 1.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last: tuple[str, Tensor] | None = None

    @property
    def names(self) -> Collection[str]:
        """Every tensor asked for so far."""
        return self._shapes.keys()

    def shape(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...]:
        """Always the expected one, which `read` then uses."""
        if self._shapes.setdefault(name, expected) != expected:
            self._shapes[name] = expected
            self._last = None
        return expected

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, at: int | None = None) -> Tensor:
        """A slice of the tensor, float32; the shape must have been asked for before."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._make(name, self._shapes[name]))
        whole = self._last[1] if at is None else self._last[1][at]
        part = whole[rows or slice(None)]
        return part if cols is None else part[:, cols]

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(math.prod(shape), generator=generator).mul_(0.02).view(shape)
