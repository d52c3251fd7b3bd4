"""What a process and all its descendants take: peak memory, and whether others used the processor meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

EAGER_S, CALM_S = 0.1, 1.0
"""Seconds between two looks: outside of what is timed, and inside, where looking costs the measured one time.
A process is timed from its start on."""

TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Looks from the moment it is made until `stop`.

    Attributes:
        peak_mib: proportional set sizes of all processes together, at their highest.
    """

    def __init__(self, root: int) -> None:
        self.peak_mib = 0.0
        self._timed = True
        self._members = {root}
        self._ticks: dict[int, int] = {}
        self._lock = threading.Lock()
        self._begin = self._elsewhere()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Something is timed from here on: look seldom."""
        self._timed = True
        self._begin = self._elsewhere()

    def end(self) -> float:
        """It is over; returns how many cores were busy with something else, on average."""
        self._timed = False
        seconds, ticks = (now - then for now, then in zip(self._elsewhere(), self._begin, strict=True))
        return max(ticks / TICKS / seconds, 0.0)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(CALM_S if self._timed else EAGER_S):
            self._find_members()
            self.peak_mib = max(self.peak_mib, sum(map(pss_kib, self._members)) / 1024)

    def _elsewhere(self) -> tuple[float, float]:
        """The time, and the processor time that neither the watched processes nor this one took so far."""
        self._find_members()
        own = os.times()
        return time.monotonic(), _busy_ticks() - sum(self._ticks.values()) - (own.user + own.system) * TICKS

    def _find_members(self) -> None:
        """Descendants stay members even when their parent has ended."""
        with self._lock:
            found = {int(entry.name): parent_and_ticks(entry) for entry in Path("/proc").glob("[0-9]*")}
            members, size = self._members & found.keys(), 0
            while size != len(members):
                size = len(members)
                members |= {child for child, (parent, _) in found.items() if parent in members}
            self._members = members
            self._ticks |= {member: found[member][1] for member in members if found[member][1]}


def parent_and_ticks(entry: Path) -> tuple[int, int]:
    """The parent's id and the processor time of its own; zeros for a process that has ended."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[11]) + int(fields[12])


def pss_kib(process: int) -> int:
    """Its proportional set size; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _busy_ticks() -> int:
    """Of all cores since the machine started; what waits does not count."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq + steal
