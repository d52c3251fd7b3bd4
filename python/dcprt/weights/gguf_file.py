"""Reading the header of a GGUF file: metadata and where each tensor lies.

The `gguf` package reads the same in two seconds, most of it numpy views of single strings, and takes a
truncated file for a shorter one. Its tables of block sizes and its dequantization are used.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dcprt.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies; `shape` is in row-major order (rows, columns), the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a file; the tensors' data is not read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata value of `key`, or `default` where it is missing.

        Raises:
            ModelError: the value has another type.
        """
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{self.path}: {key} has the value {value!r}, which has the wrong type.")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The metadata value of `key`.

        Raises:
            ModelError: it is missing or has another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: the metadata has no {key}.")
        return value


class _Cursor:
    """Reads little-endian values one after the other and knows where the file ends."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def truncated(self) -> NoReturn:
        raise ModelError(f"{self.path} is truncated: it ends at byte {len(self.data)}, inside its header.")

    def unpack(self, code: str) -> Any:
        try:
            value = struct.unpack_from("<" + code, self.data, self.at)[0]
        except struct.error:
            self.truncated()
        self.at += struct.calcsize("<" + code)
        return value

    def many(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize("<" + code) * count
        if size > len(self.data) - self.at:
            self.truncated()
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return list(values)

    def text(self) -> str:
        size = self.unpack("Q")
        if size > len(self.data) - self.at:
            self.truncated()
        raw = self.data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            text = f"{self.path} is damaged: the string at byte {self.at - size} is not UTF-8."
            raise ModelError(text) from None

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.unpack(_SCALARS[type_id])
        if type_id == _STRING:
            return self.text()
        if type_id != _ARRAY:
            raise ModelError(f"{self.path} is damaged: metadata type {type_id} at byte {self.at} is unknown.")
        item, count = self.unpack("I"), self.unpack("Q")
        if item in _SCALARS:
            return self.many(_SCALARS[item], count)
        if item == _STRING:
            return [self.text() for _ in range(count)]
        raise ModelError(f"{self.path}: metadata arrays of type {item} are not supported.")


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor places of a GGUF file, and check that the tensors lie inside the file.

    Raises:
        ModelError: no GGUF file, a version that is not supported, damaged, truncated, or not readable.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{path} is empty.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error


def _parse(cursor: _Cursor) -> GgufFile:
    _check_version(cursor)
    tensor_count, pair_count = cursor.unpack("Q"), cursor.unpack("Q")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text()
        if key in metadata:
            raise ModelError(f"{cursor.path} is damaged: its metadata has {key} twice.")
        metadata[key] = cursor.value(cursor.unpack("I"))
    places = [_tensor_place(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{cursor.path} is damaged: general.alignment is {alignment!r}, no power of two.")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in places:
        if name in tensors:
            raise ModelError(f"{cursor.path} is damaged: it has the tensor {name} twice.")
        size = _data_size(cursor.path, name, shape, type_id)
        if start + offset + size > len(cursor.data):
            raise ModelError(
                f"{cursor.path} is truncated: tensor {name} ends at byte {start + offset + size}, "
                f"the file at {len(cursor.data)}."
            )
        tensors[name] = GgufTensor(name, shape, type_id, start + offset, size)
    return GgufFile(cursor.path, metadata, tensors)


def _check_version(cursor: _Cursor) -> None:
    if cursor.data[:4] != b"GGUF":
        raise ModelError(f"{cursor.path} is no GGUF file: it begins with {cursor.data[:4]!r}, not b'GGUF'.")
    cursor.at = 4
    version = cursor.unpack("I")
    if version and version & 0xFFFF == 0:
        raise ModelError(f"{cursor.path} is a big-endian GGUF file, which is not supported.")
    if version not in _VERSIONS:
        raise ModelError(f"{cursor.path} has GGUF version {version}; versions 2 and 3 are supported.")


def _tensor_place(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dimensions = cursor.unpack("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path} is damaged: tensor {name} has {dimensions} dimensions.")
    shape = tuple(reversed(cursor.many("Q", dimensions)))
    return name, shape, cursor.unpack("I"), cursor.unpack("Q")


def _data_size(path: Path, name: str, shape: tuple[int, ...], type_id: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):
        raise ModelError(f"{path}: tensor {name} has the unknown type {type_id}.") from None
    elements = 1
    for length in shape:
        elements *= length
    if shape and shape[-1] % block:
        raise ModelError(f"{path} is damaged: rows of {name} have {shape[-1]} elements, no multiple of {block}.")
    return elements // block * block_bytes
