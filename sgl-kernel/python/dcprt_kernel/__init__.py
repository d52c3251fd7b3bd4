"""Native kernels of dcprt, for torch tensors on the CPU (or anything else that speaks DLPack).

Calls release the GIL. Importing this package imports torch where it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm_ffi

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INTERFACE", "Op", "ShmGroup", "ShmMismatchError", "ShmTimeoutError", "held"]
__version__ = "0.1.0"

INTERFACE = 7
"""Raised with every change of what a function takes or how packed weights lie."""

_LIBRARY = tvm_ffi.load_module(Path(__file__).with_name("libdcprt_kernel.so"))
_open = _LIBRARY.shm_open
_close = _LIBRARY.shm_close
_start = _LIBRARY.shm_start
_finish = _LIBRARY.shm_finish
_call = _LIBRARY.shm_call
_last = _LIBRARY.shm_last
_peer = _LIBRARY.shm_peer

_TIMEOUT = 1


def held(tensors: Sequence[Tensor]) -> Any:
    """The tensors as kernels take many of them: they are looked at once, and live as long as the result."""
    return tvm_ffi.convert(list(tensors))


class Op(IntEnum):
    """The collectives, as the library numbers them."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    BARRIER = 6


class ShmTimeoutError(RuntimeError):
    """The deadline passed; `missing` are the ranks that had not arrived."""

    def __init__(self, missing: tuple[int, ...]) -> None:
        super().__init__(f"no answer from ranks {missing}")
        self.missing = missing


class ShmMismatchError(RuntimeError):
    """The ranks called different things; `calls` describes each rank's, empty where it had not arrived."""

    def __init__(self, calls: tuple[str, ...]) -> None:
        super().__init__(f"the ranks differ: {calls}")
        self.calls = calls


class ShmGroup:
    """One rank's end of a group that meets in shared memory. For one thread at a time.

    One call is open at a time: every `start` is followed by `finish` before the next. After
    `ShmTimeoutError` or `ShmMismatchError` the group cannot be used again.
    """

    def __init__(self, fd: int, rank: int, ranks: int, slot_bytes: int) -> None:
        """Maps the arena behind `fd`: zeroed memory, headers and two slots of `slot_bytes` per rank."""
        self._ranks = ranks
        self._handle: int | None = _open(fd, rank, ranks, slot_bytes)

    def start(self, op: Op, x: Tensor, out: Tensor, root: int, timeout_s: float) -> None:
        """Publishes `x`. Both tensors are contiguous and stay alive and untouched until `finish` returns.

        Raises:
            ValueError: the tensors do not fit `op`.
            ShmTimeoutError, ShmMismatchError: a rank is missing from, or differed in, the broadcast before.
        """
        self._check(_start(self._handle, int(op), x, out, root, timeout_s))

    def finish(self, timeout_s: float) -> None:
        """Waits for the other ranks and fills the `out` given to `start`.

        Raises:
            ShmTimeoutError: a rank did not arrive within `timeout_s`.
            ShmMismatchError: a rank called another operation, or the same with another size or dtype.
        """
        self._check(_finish(self._handle, timeout_s))

    def call(self, op: Op, x: Tensor, out: Tensor, timeout_s: float) -> None:
        """`start` and `finish` in one; not for a broadcast.

        Raises:
            ValueError, ShmTimeoutError, ShmMismatchError: as they do.
        """
        self._check(_call(self._handle, op, x, out, timeout_s))

    @property
    def handle(self) -> int:
        """For native calls with operations of their own; none of `start` may be open meanwhile."""
        assert self._handle is not None, "the group is closed"
        return self._handle

    def last(self) -> Op:
        """The operation that was started last."""
        return Op(_last(self._handle)[0])

    def raise_last(self) -> None:
        """Raises what the last operation failed with, if it failed.

        Raises:
            ShmTimeoutError, ShmMismatchError: as `finish` does.
        """
        self._check(_last(self._handle)[1])

    def close(self) -> None:
        """Unmaps the arena; the descriptor stays the caller's."""
        if self._handle is not None:
            _close(self._handle)
            self._handle = None

    def _check(self, status: int) -> None:
        if status == 0:
            return
        peers = [_peer(self._handle, rank) for rank in range(self._ranks)]
        if status == _TIMEOUT:
            raise ShmTimeoutError(tuple(rank for rank, peer in enumerate(peers) if not peer[0]))
        raise ShmMismatchError(tuple(_describe(*peer) for peer in peers))


def _describe(arrived: bool, op: int, dtype: int, root: int, size: int) -> str:
    if not arrived:
        return ""
    name = Op(op).name.lower()
    if op == Op.BARRIER:
        return name
    kind = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}.get(dtype >> 16, "dtype")
    source = f" from rank {root}" if op == Op.BROADCAST else ""
    return f"{name} of {size} bytes of {kind}{dtype & 0xFFFF}{source}"
