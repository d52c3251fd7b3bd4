"""Ranks as threads of one process, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Condition

import torch
from torch import Tensor

from dcprt.comm.base import BaseCollective, describe, ordered_sum
from dcprt.comm.protocol import Handle


@dataclass
class _Round:
    """One operation: what each rank brought, and who has taken the result."""

    calls: dict[int, str] = field(default_factory=dict)
    data: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


class LocalHub:
    """The meeting place of one group of `size` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rounds: dict[int, _Round] = {}
        self._changed = Condition()

    def post(self, number: int, rank: int, call: str, data: Tensor) -> None:
        with self._changed:
            entry = self._rounds.setdefault(number, _Round())
            entry.calls[rank] = call
            entry.data[rank] = data
            self._changed.notify_all()

    def collect(self, number: int, rank: int, timeout_s: float) -> tuple[dict[int, str], list[Tensor]]:
        """Calls and data of all ranks in round `number`; of fewer if they differ or did not come in time."""
        with self._changed:
            entry = self._rounds[number]
            self._changed.wait_for(
                lambda: len(entry.calls) == self.size or len(set(entry.calls.values())) > 1, timeout_s
            )
            entry.taken.add(rank)
            if len(entry.taken) == self.size:
                del self._rounds[number]
            return dict(entry.calls), [entry.data[j] for j in sorted(entry.data)]


class LocalCollective(BaseCollective):
    """One thread's end of a `LocalHub`."""

    def __init__(self, name: str, rank: int, hub: LocalHub, timeout_s: float | None = None) -> None:
        super().__init__(name, rank, hub.size, timeout_s)
        self.hub = hub
        self._round = 0

    def _start(self, op: str, x: Tensor, root: int) -> Handle:
        self._round += 1
        call = describe(op, x, root)
        self.hub.post(self._round, self.rank, call, x.detach().clone(memory_format=torch.contiguous_format))
        return _LocalHandle(self, op, x, root, self._round)

    def finish(self, op: str, x: Tensor, root: int, number: int) -> Tensor:
        """Waits for round `number` and computes this rank's result of `op` on `x`."""
        calls, parts = self.hub.collect(number, self.rank, self.timeout_s)
        if len(set(calls.values())) > 1:
            raise self._mismatch(op, [calls.get(j, "") for j in range(self.size)])
        if missing := [j for j in range(self.size) if j not in calls]:
            raise self._timeout(op, missing)
        if op == "all_reduce":
            return x.copy_(ordered_sum(parts))
        if op == "all_gather":
            return torch.stack(parts)
        if op == "reduce_scatter":
            return ordered_sum([part[self.rank] for part in parts])
        if op == "all_to_all":
            return torch.stack([part[self.rank] for part in parts])
        return x.copy_(parts[root])


class _LocalHandle:
    def __init__(self, group: LocalCollective, op: str, x: Tensor, root: int, number: int) -> None:
        self._group = group
        self._call = (op, x, root, number)
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._group.finish(*self._call)
        return self._result
