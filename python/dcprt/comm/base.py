"""What the backends share: checks of arguments, the synchronous forms, error texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dcprt import env
from dcprt.comm.protocol import Handle
from dcprt.errors import CollectiveError, CollectiveTimeout

SUMMED = (torch.float32, torch.bfloat16)


class Done:
    """The handle of an operation that needed nobody else."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class BaseCollective(ABC):
    """A `Collective` over one method, `_start`. Groups of one rank never reach it."""

    def __init__(self, name: str, rank: int, size: int, timeout_s: float | None = None) -> None:
        if not 0 <= rank < size:
            raise CollectiveError(f"Rank {rank} is not in group {name!r} of {size}.")
        self.name = name
        self.rank = rank
        self.size = size
        self.timeout_s = env.collective_timeout_s() if timeout_s is None else timeout_s
        self._step: int | None = None
        self._unusable = ""

    @abstractmethod
    def _start(self, op: str, x: Tensor, root: int) -> Handle:
        """Begins `op` on checked arguments; `size` is at least 2. `op` is the name of the method."""

    def start_all_reduce(self, x: Tensor) -> Handle:
        self._check("all_reduce", x)
        return Done(x) if self.size == 1 else self._start("all_reduce", x, 0)

    def start_all_gather(self, x: Tensor) -> Handle:
        self._check("all_gather", x)
        return Done(x.detach().clone()[None]) if self.size == 1 else self._start("all_gather", x, 0)

    def start_reduce_scatter(self, x: Tensor) -> Handle:
        self._check("reduce_scatter", x)
        return Done(x.detach()[0].clone()) if self.size == 1 else self._start("reduce_scatter", x, 0)

    def start_all_to_all(self, x: Tensor) -> Handle:
        self._check("all_to_all", x)
        return Done(x.detach().clone()) if self.size == 1 else self._start("all_to_all", x, 0)

    def start_broadcast(self, x: Tensor, root: int = 0) -> Handle:
        self._check("broadcast", x)
        if not 0 <= root < self.size:
            raise CollectiveError(f"{self._where('broadcast')}: there is no rank {root} in {self.size}.")
        return Done(x) if self.size == 1 else self._start("broadcast", x, root)

    def start_barrier(self) -> Handle:
        nothing = torch.empty(0, dtype=torch.uint8)
        self._check("barrier", nothing)
        return Done(nothing) if self.size == 1 else self._start("barrier", nothing, 0)

    def _run(self, op: str, x: Tensor) -> Tensor:
        """`op` on checked arguments from begin to end; `size` is at least 2."""
        return self._start(op, x, 0).wait()

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._checked_run("all_reduce", x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._checked_run("all_gather", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._checked_run("reduce_scatter", x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._checked_run("all_to_all", x)

    def _checked_run(self, op: str, x: Tensor) -> Tensor:
        if self.size == 1:
            done: Handle = getattr(self, f"start_{op}")(x)
            return done.wait()
        self._check(op, x)
        return self._run(op, x)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self.start_broadcast(x, root).wait()

    def barrier(self) -> None:
        self.start_barrier().wait()

    def set_step(self, n: int) -> None:
        self._step = n

    def close(self) -> None:
        self._unusable = "closed"

    def _check(self, op: str, x: Tensor) -> None:
        self._check_usable(op)
        if op in ("all_reduce", "reduce_scatter") and x.dtype not in SUMMED:
            kind = _name(x.dtype)
            raise CollectiveError(f"{self._where(op)}: sums are for float32 and bfloat16, not {kind}.")
        if op in ("reduce_scatter", "all_to_all") and (x.ndim == 0 or x.shape[0] != self.size):
            raise CollectiveError(
                f"{self._where(op)}: the first of the sizes {list(x.shape)} must be the group's, {self.size}."
            )

    def _check_usable(self, op: str) -> None:
        if self._unusable:
            raise CollectiveError(f"{self._where(op)}: the group cannot be used any more: {self._unusable}")

    def _where(self, op: str) -> str:
        step = "" if self._step is None else f" in step {self._step}"
        return f"{op} of group {self.name!r}{step}"

    def _timeout(self, op: str, missing: Sequence[int] = ()) -> CollectiveTimeout:
        """The error of a passed deadline; the group is unusable from here on."""
        after = f"after {self.timeout_s:g} s"
        if missing:
            ranks = "rank" if len(missing) == 1 else "ranks"
            text = f"{self._where(op)}: no answer from {ranks} {', '.join(map(str, missing))} {after}"
        else:
            text = f"{self._where(op)}: not complete {after}"
        self._unusable = text
        return CollectiveTimeout(text)

    def _mismatch(self, op: str, calls: Sequence[str]) -> CollectiveError:
        """The error of ranks that called different things; `calls[j]` is rank j's, empty if unknown."""
        told = "; ".join(f"rank {j} called {call}" for j, call in enumerate(calls) if call)
        return self._failed(op, f"the ranks differ: {told}")

    def _failed(self, op: str, why: str) -> CollectiveError:
        text = f"{self._where(op)}: {why}"
        self._unusable = text
        return CollectiveError(text)


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of equally shaped float32 or bfloat16 tensors in their order; bfloat16 in float32, rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part.to(torch.float32)
    return total.to(parts[0].dtype)


def describe(op: str, x: Tensor, root: int) -> str:
    """A call, for comparison between ranks and for error texts."""
    if op == "barrier":
        return op
    source = f" from rank {root}" if op == "broadcast" else ""
    return f"{op} of {x.numel() * x.element_size()} bytes of {_name(x.dtype)}{source}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
