"""The groups a rank is in, and the choice of the backend behind them. Imports no torch by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from dcprt import env
from dcprt.comm.arena import Arena, Arenas
from dcprt.comm.protocol import Collective
from dcprt.errors import ConfigError, did_you_mean
from dcprt.planner import host

BACKENDS: Mapping[str, str] = MappingProxyType({"shm": "dcprt.comm.shm", "gloo": "dcprt.comm.gloo"})
"""Name of a backend to its module, which has `open_group(place: Place) -> Collective`."""


@dataclass(frozen=True)
class Groups:
    """One rank's groups: all ranks that hold the model, and those over which a sequence's KV is spread."""

    world: Collective
    dcp: Collective

    def set_step(self, n: int) -> None:
        """The number of the step plan being executed, for error texts."""
        self.world.set_step(n)
        self.dcp.set_step(n)

    def close(self) -> None:
        self.dcp.close()
        self.world.close()


@dataclass(frozen=True)
class Place:
    """What a backend is told about one group: the rank's number in it, and the means the parent provided.

    `index` tells groups of the same name apart.
    """

    name: str
    index: int
    rank: int
    size: int
    timeout_s: float
    arena: Arena | None = None
    directory: Path | None = None


def default_backend() -> str:
    """`$DCPRT_COMM`, else `shm` where its kernels are installed, else `gloo`. Imports neither.

    Raises:
        ConfigError: the variable names no backend, or one that is not installed.
    """
    has_kernels, chosen = host.has_kernels(), env.comm_backend()
    if not chosen:
        return "shm" if has_kernels else "gloo"
    if chosen == "shm" and not has_kernels:
        raise ConfigError("DCPRT_COMM=shm needs Linux and the package dcprt-kernel; use gloo without.")
    return chosen


def connect(
    backend: str,
    rank: int,
    tp: int,
    dcp: int,
    *,
    arenas: Arenas | None = None,
    directory: str | Path | None = None,
    timeout_s: float | None = None,
) -> Groups:
    """Joins the world and the dcp group of `rank`, one of `tp`; every rank calls it.

    `shm` needs `arenas` (made by the parent for the same `tp` and `dcp`), `gloo` a private, empty `directory`
    that all ranks see. Dcp group i is the ranks `i*dcp .. (i+1)*dcp - 1`. The deadline defaults to the
    environment's.

    Raises:
        ConfigError: there is no such backend.
        CollectiveError: not all ranks came, or the backend lacks what it needs.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"No backend {backend!r} for collectives.{did_you_mean(backend, BACKENDS)}")
    index, dcp_rank = divmod(rank, dcp)
    limit = env.collective_timeout_s() if timeout_s is None else timeout_s
    folder = None if directory is None else Path(directory)
    dcp_arena = arenas.dcp[index] if arenas is not None and dcp > 1 else None
    world = Place("world", 0, rank, tp, limit, arenas.world if arenas is not None else None, folder)
    return Groups(
        world=_open(backend, world),
        dcp=_open(backend, Place("dcp", index, dcp_rank, dcp, limit, dcp_arena, folder)),
    )


def local_groups(tp: int, dcp: int, timeout_s: float | None = None) -> list[Groups]:
    """The groups of `tp` ranks that are threads of this process, one entry per rank."""
    from dcprt.comm.local import LocalCollective, LocalHub

    world = LocalHub(tp)
    hubs = [LocalHub(dcp) for _ in range(tp // dcp)]
    return [
        Groups(
            world=LocalCollective("world", rank, world, timeout_s),
            dcp=LocalCollective("dcp", rank % dcp, hubs[rank // dcp], timeout_s),
        )
        for rank in range(tp)
    ]


def _open(backend: str, place: Place) -> Collective:
    if place.size == 1:
        from dcprt.comm.local import LocalCollective, LocalHub

        return LocalCollective(place.name, 0, LocalHub(1), place.timeout_s)
    group: Collective = import_module(BACKENDS[backend]).open_group(place)
    return group
