"""Collectives over shared memory: processes of one host, over the native kernels of `dcprt_kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

from dcprt.comm.arena import Arena
from dcprt.comm.base import BaseCollective
from dcprt.comm.groups import Place
from dcprt.comm.protocol import Collective, Handle
from dcprt.errors import CollectiveError
from dcprt_kernel import Op, ShmGroup, ShmMismatchError, ShmTimeoutError


def open_group(place: Place) -> Collective:
    """The backend's entry in the registry."""
    if place.arena is None:
        raise CollectiveError(f"shm needs an arena for group {place.name!r}.")
    return ShmCollective(place.name, place.rank, place.arena, place.timeout_s)


class ShmCollective(BaseCollective):
    """One process's end of a shared arena.

    The arena has room for one operation at a time: starting one completes the one before.
    """

    def __init__(self, name: str, rank: int, arena: Arena, timeout_s: float | None = None) -> None:
        super().__init__(name, rank, arena.ranks, timeout_s)
        self._native = ShmGroup(arena.fd, rank, arena.ranks, arena.slot_bytes)
        self._open: _ShmHandle | None = None

    def close(self) -> None:
        super().close()
        self._open = None
        self._native.close()

    def _start(self, op: str, x: Tensor, root: int) -> Handle:
        if self._open is not None:
            self._open.wait()
        data = x.detach() if x.requires_grad else x
        source = data if data.is_contiguous() else data.contiguous()
        try:
            handle = _ShmHandle(self, op, source, self._output(op, source), data)
            self._native.start(_OPS[op], source, handle.out, root, self.timeout_s)
        except (ShmTimeoutError, ShmMismatchError) as error:
            raise self.translated(op, error) from error
        self._open = handle
        return handle

    def _run(self, op: str, x: Tensor) -> Tensor:
        if self._open is not None:
            self._open.wait()
        if x.requires_grad or not x.is_contiguous():
            return self._start(op, x, 0).wait()
        out = self._output(op, x)
        try:
            self._native.call(_OPS[op], x, out, self.timeout_s)
        except (ShmTimeoutError, ShmMismatchError) as error:
            raise self.translated(op, error) from error
        return out

    def _output(self, op: str, source: Tensor) -> Tensor:
        if op == "all_gather":
            return source.new_empty((self.size, *source.shape))
        if op == "reduce_scatter":
            return source.new_empty(source.shape[1:])
        if op == "all_to_all":
            return torch.empty_like(source)
        return source

    def finish(self, op: str) -> None:
        """Waits for the open operation; its output tensor is filled afterwards."""
        self._check_usable(op)
        self._open = None
        try:
            self._native.finish(self.timeout_s)
        except (ShmTimeoutError, ShmMismatchError) as error:
            raise self.translated(op, error) from error

    def lend(self) -> ShmGroup:
        """The native group, for a call with operations of its own; none is open, and an unusable group raises."""
        if self._open is not None:
            self._open.wait()
        self._check_usable("a native call")
        return self._native

    def raise_lent(self) -> None:
        """Raises what the last operation of such a call failed with."""
        try:
            self._native.raise_last()
        except (ShmTimeoutError, ShmMismatchError) as error:
            raise self.translated(self._native.last().name.lower(), error) from error

    def translated(self, op: str, error: ShmTimeoutError | ShmMismatchError) -> CollectiveError:
        """The native error, as one of ours."""
        if isinstance(error, ShmTimeoutError):
            return self._timeout(op, error.missing)
        return self._mismatch(op, error.calls)


class _ShmHandle:
    def __init__(self, group: ShmCollective, op: str, source: Tensor, out: Tensor, x: Tensor) -> None:
        self._group = group
        self._op = op
        self._source = source
        self._x = x
        self._done = False
        self.out = out

    def wait(self) -> Tensor:
        if not self._done:
            self._group.finish(self._op)
            self._done = True
            if self.out is self._source and self._source is not self._x:
                self.out = self._x.copy_(self.out)
        return self.out


_OPS = {op.name.lower(): op for op in Op}
