"""The shared memory in which ranks of one host meet: created by the parent, inherited by the children.

The memory is a memfd: it has no name, so nothing is left in /dev/shm, and it goes with the last process
that holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass

DEFAULT_SLOT_BYTES = 1 << 20
"""Two slots per rank; what is larger goes through in pieces. Memory is taken only where it is written."""

_HEADER_BYTES = 128
_PAGE = 4096


@dataclass(frozen=True)
class Arena:
    """Memory of one group, behind a descriptor. The kernels check that it is as large as they need."""

    fd: int
    ranks: int
    slot_bytes: int = DEFAULT_SLOT_BYTES

    @property
    def total_bytes(self) -> int:
        """A header for the group, one per rank, padding to a page, two slots per rank."""
        headers = -(-_HEADER_BYTES * (1 + self.ranks) // _PAGE) * _PAGE
        return headers + 2 * self.ranks * self.slot_bytes


@dataclass(frozen=True)
class Arenas:
    """The arenas of one copy of the model; groups of one rank need none."""

    world: Arena | None
    dcp: tuple[Arena, ...]

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors a child must inherit (`pass_fds`)."""
        return tuple(arena.fd for arena in (self.world, *self.dcp) if arena is not None)

    def to_json(self) -> str:
        """For the child's configuration: descriptors keep their numbers in a child that inherits them."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Arenas:
        """What `to_json` wrote."""
        data = json.loads(text)
        world = data["world"]
        return cls(Arena(**world) if world else None, tuple(Arena(**arena) for arena in data["dcp"]))

    def close(self) -> None:
        """Closes the descriptors; a process that has mapped them keeps the memory."""
        for fd in self.fds:
            os.close(fd)


def create_arenas(tp: int, dcp: int, slot_bytes: int = DEFAULT_SLOT_BYTES) -> Arenas:
    """Arenas for the world of `tp` ranks and its `tp // dcp` dcp groups; `slot_bytes` divides by 64."""
    world = create_arena("world", tp, slot_bytes) if tp > 1 else None
    groups = tp // dcp if dcp > 1 else 0
    return Arenas(world, tuple(create_arena(f"dcp-{i}", dcp, slot_bytes) for i in range(groups)))


def create_arena(name: str, ranks: int, slot_bytes: int = DEFAULT_SLOT_BYTES) -> Arena:
    """A zeroed arena of fixed size; `name` shows in /proc/PID/fd."""
    fd = os.memfd_create(f"dcprt-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    arena = Arena(fd, ranks, slot_bytes)
    os.ftruncate(fd, arena.total_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return arena
