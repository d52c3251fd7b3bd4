"""Collectives over torch.distributed's gloo: processes of one host, over loopback TCP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo, Work  # type: ignore[attr-defined]

from dcprt.comm.base import BaseCollective, ordered_sum
from dcprt.comm.groups import Place
from dcprt.comm.protocol import Collective, Handle
from dcprt.errors import CollectiveError


def open_group(place: Place) -> Collective:
    """The backend's entry in the registry."""
    if place.directory is None:
        raise CollectiveError(f"gloo needs a directory in which the ranks of group {place.name!r} can meet.")
    meeting = place.directory / f"{place.name}-{place.index}"
    return GlooCollective(place.name, place.rank, place.size, meeting, place.timeout_s)


class GlooCollective(BaseCollective):
    """One process's end of a gloo group. Tensors travel as bytes, so any dtype does."""

    def __init__(self, name: str, rank: int, size: int, meeting: Path, timeout_s: float | None = None) -> None:
        """Meets the other ranks in the file `meeting`, which is new and is removed by the last to close.

        Raises:
            CollectiveTimeout: not all ranks came.
        """
        super().__init__(name, rank, size, timeout_s)
        deadline = timedelta(seconds=self.timeout_s)
        gloo: Any = ProcessGroupGloo  # its type stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = deadline
        try:
            store = FileStore(str(meeting), size)
            store.set_timeout(deadline)
            self._gloo: Any = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise self.translated("connect", error) from error

    def close(self) -> None:
        super().close()
        self._gloo = None

    def _start(self, op: str, x: Tensor, root: int) -> Handle:
        try:
            work, finish = self._begin(op, x, root)
        except RuntimeError as error:
            raise self.translated(op, error) from error
        return _GlooHandle(self, op, work, finish)

    def _begin(self, op: str, x: Tensor, root: int) -> tuple[Work, Callable[[], Tensor]]:
        """The work under way, and what makes the result of it."""
        gloo = self._gloo
        source = x.detach().contiguous()
        if op in ("all_reduce", "all_gather"):
            received = torch.empty((self.size, *x.shape), dtype=x.dtype)
        else:
            received = torch.empty_like(source)
        if source.numel() == 0:
            work = gloo.barrier()
        elif op in ("all_reduce", "all_gather"):
            work = gloo._allgather_base(_as_bytes(received), _as_bytes(source))
        elif op in ("reduce_scatter", "all_to_all"):
            work = gloo.alltoall_base(_as_bytes(received), _as_bytes(source), [], [])
        else:
            received = source
            work = gloo.broadcast(_as_bytes(received), root)
        if op == "all_reduce":
            return work, lambda: x.copy_(ordered_sum(received.unbind()))
        if op == "reduce_scatter":
            return work, lambda: ordered_sum(received.unbind())
        if op == "broadcast":
            return work, lambda: x.copy_(received)
        return work, lambda: received

    def translated(self, op: str, error: RuntimeError) -> CollectiveError:
        """What gloo said, as one of ours."""
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            return self._timeout(op)
        return self._failed(op, f"a peer is gone, or gloo failed: {text.splitlines()[0]}")


class _GlooHandle:
    def __init__(self, group: GlooCollective, op: str, work: Work, finish: Callable[[], Tensor]) -> None:
        self._group = group
        self._op = op
        self._work = work
        self._finish = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            try:
                self._work.wait(timedelta(seconds=self._group.timeout_s))
            except RuntimeError as error:
                raise self._group.translated(self._op, error) from error
            self._result = self._finish()
        return self._result


def _as_bytes(x: Tensor) -> Tensor:
    """A view of the contiguous, non-empty `x`: `[bytes]`, uint8."""
    return x.reshape(-1).view(torch.uint8)
