"""What every backend of collectives offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Handle(Protocol):
    """A collective under way. The tensor given to it is neither read nor written until `wait` returns."""

    def wait(self) -> Tensor:
        """The result of the operation; waiting again returns it again.

        Raises:
            CollectiveTimeout: a rank did not answer within the deadline, which counts from this call (gloo:
                from the start).
            CollectiveError: the ranks called different operations, or a peer is gone.
        """
        ...


class Collective(Protocol):
    """One rank's end of one group, for one thread at a time.

    Every rank of the group calls the same operations in the same order, with tensors of the same shape and
    dtype. Whether an operation is called must depend only on what all ranks know alike. Tensors may be
    non-contiguous and of any size, also empty. Sums are for float32 and bfloat16, are taken in rank order
    (bfloat16 in float32, rounded once), and so have the same bits on every rank and in every backend. The
    other operations take any dtype.

    `start_x(...).wait()` is the same as `x(...)`. Handles may be waited for in any order; starting an
    operation may complete the one before. After an operation failed the group cannot be used again.
    """

    @property
    def name(self) -> str:
        """`world` or `dcp`; for error texts."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, written into `x`, which is returned."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` of every rank: `[size, *x.shape]`."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`x: [size, *rest]` to `[*rest]`: the sum over ranks of their `x[rank]`."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """`x: [size, *rest]` to the same shape: `out[j]` is what rank j had at `x[rank]`."""
        ...

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """`x` of rank `root`, written into `x` of the others, which is returned."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def start_all_reduce(self, x: Tensor) -> Handle: ...

    def start_all_gather(self, x: Tensor) -> Handle: ...

    def start_reduce_scatter(self, x: Tensor) -> Handle: ...

    def start_all_to_all(self, x: Tensor) -> Handle: ...

    def start_broadcast(self, x: Tensor, root: int = 0) -> Handle: ...

    def start_barrier(self) -> Handle:
        """The handle's `wait` returns an empty tensor."""
        ...

    def set_step(self, n: int) -> None:
        """The number of the step plan being executed; for error texts."""
        ...

    def close(self) -> None:
        """Gives back what the group holds; it cannot be used afterwards. Closing twice is allowed."""
        ...
