"""The private directory of one server: its sockets live there, and it goes when the last process has left.

Each process holds a shared lock on the directory's lock file. Whoever can get the lock alone is the last one and
removes the directory; whoever starts removes those of servers that died without a chance to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from dcprt.errors import ConfigError

PREFIX = f"dcprt-{os.getuid()}-"
LOCK = "lock"
PATIENCE_S = 2.0
LONGEST = 107 - len("/plans-0000")


def base_dir() -> Path:
    """Where run directories are made: the temporary directory. Socket paths must stay under 108 bytes."""
    return Path(tempfile.gettempdir())


class RunDir:
    """A run directory and this process's hold on it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> RunDir:
        """A new directory, mode 0700; sweeps those of dead owners first.

        Raises:
            ConfigError: the temporary directory is too long, or cannot be written.
        """
        sweep()
        while True:
            try:
                path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base_dir()))
            except OSError as error:
                raise ConfigError(f"Cannot make a directory for sockets in {base_dir()}: {error.strerror}.") from error
            if len(os.fsencode(path)) > LONGEST:
                path.rmdir()
                raise ConfigError(
                    f"The temporary directory {base_dir()} is too long to hold sockets, which may take 107 bytes "
                    f"in all; set TMPDIR to a shorter one."
                )
            lock = _hold(path, os.O_CREAT)
            if (path / LOCK).exists():
                return cls(path, lock)
            os.close(lock)  # swept by another start before it was locked

    @classmethod
    def join(cls, path: str) -> RunDir:
        """The directory that the parent made.

        Raises:
            OSError: it is gone, so the parent is too.
        """
        return cls(Path(path), _hold(Path(path), 0))

    def leave(self, *, patient: bool = False) -> None:
        """Let go; remove the directory if nobody else is left.

        `patient` waits a moment for the others, which are ending too: a dying process closes its sockets before its
        lock, so that whoever sees the end of a socket may be too early for the lock.
        """
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        fcntl.flock(lock, fcntl.LOCK_UN)
        end = time.monotonic() + (PATIENCE_S if patient else 0)
        while not self._removed(lock) and time.monotonic() < end:
            time.sleep(0.01)
        os.close(lock)

    def _removed(self, lock: int) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return not self.path.exists()
        shutil.rmtree(self.path, ignore_errors=True)
        return True


def _hold(path: Path, flags: int) -> int:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def sweep() -> None:
    """Remove the run directories of this user that no process holds."""
    for path in base_dir().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    """Raises OSError if the directory is alive, or being made this moment and still without its lock file."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
