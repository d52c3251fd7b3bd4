"""Processes of a test's own servers and engines, found by the temporary directory in their environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

ROLES = ("tokenizer", "scheduler", "rank")


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether `condition` became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def with_tmpdir(directory: Path) -> list[int]:
    """All processes whose TMPDIR is `directory`, whoever their parent is."""
    wanted = f"TMPDIR={directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if is_alive(pid) and pid != os.getpid()]


def role(pid: int) -> str | None:
    """`tokenizer`, `scheduler` or `rank`; None for any other process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return None
    return words[words.index("dcprt.runtime.child") + 1] if "dcprt.runtime.child" in words else None


def has_torch(pid: int) -> bool:
    """Whether torch is mapped into a process."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


class Traces:
    """What processes with TMPDIR = `directory` could leave behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._shm = self._shared_memory()

    def left(self) -> list[str]:
        """Processes, files in the temporary directory, and segments in /dev/shm of a name that could be ours."""
        processes = [f"process {pid} ({role(pid)})" for pid in with_tmpdir(self.directory)]
        files = [str(path) for path in self.directory.iterdir()]
        marks = ("dcprt", "torch", "gloo", "python", "psm_")
        segments = [name for name in self._shared_memory() - self._shm if any(mark in name for mark in marks)]
        return processes + files + segments

    def gone(self, seconds: float = 10.0) -> list[str]:
        """What is still left after at most `seconds`."""
        wait_until(lambda: not self.left(), seconds)
        return self.left()

    @staticmethod
    def _shared_memory() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}
