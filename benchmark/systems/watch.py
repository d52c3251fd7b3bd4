"""Peak memory of a process and all its descendants, as the sum of their proportional set sizes (PSS)."""

from __future__ import annotations

import threading
from pathlib import Path

EAGER_S, CALM_S = 0.1, 1.0
"""Seconds between two looks: outside of what is timed, and inside, where looking costs the measured one time."""


class MemoryWatch:
    """Looks from the moment it is made until `stop`."""

    def __init__(self, root: int) -> None:
        self.calm = False
        self.peak_mib = 0.0
        self._members = {root}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """The peak in MiB."""
        self._ended.set()
        self._thread.join()
        return self.peak_mib

    def _look(self) -> None:
        while not self._ended.wait(CALM_S if self.calm else EAGER_S):
            self._find_members()
            self.peak_mib = max(self.peak_mib, sum(map(_pss_kib, self._members)) / 1024)

    def _find_members(self) -> None:
        """Descendants stay members even when their parent has ended."""
        parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        self._members &= parents.keys()
        size = 0
        while size != len(self._members):
            size = len(self._members)
            self._members |= {child for child, parent in parents.items() if parent in self._members}


def _parent(entry: Path) -> int:
    """The parent's id; 0 for a process that has ended."""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _pss_kib(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
