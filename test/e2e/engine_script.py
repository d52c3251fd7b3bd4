"""Scripts that use the engine, each in a Python process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .processes import Traces, wait_until, with_tmpdir

OPTIONS = 'dtype="float32", kv_cache_tokens=2048'


class Script:
    """A script under way, with a temporary directory of its own. `OPTIONS` in it stands for quick engine options."""

    def __init__(self, text: str, *, stdin: bool = False, beside: tuple[str, ...] = ()) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="dcprt-e2e-")
        home = Path(self._home.name)
        self.cwd, self.tmpdir = home / "cwd", home / "tmp"
        for directory in (self.cwd, self.tmpdir, home / "code"):
            directory.mkdir()
        for name in beside:
            (self.cwd / name).write_text("raise SystemExit('imported from the working directory')")
        path = home / "code" / "script.py"
        path.write_text(text.replace("OPTIONS", OPTIONS))
        self.traces = Traces(self.tmpdir)
        with path.open() as source:
            self.process = subprocess.Popen(
                [sys.executable, "-" if stdin else str(path)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=self.cwd,
                env={**os.environ, "TMPDIR": str(self.tmpdir)},
                start_new_session=True,
            )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.traces.gone(10)
        for pid in with_tmpdir(self.tmpdir):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not with_tmpdir(self.tmpdir), 10)
        self._home.cleanup()

    def end(self) -> tuple[int, str, str]:
        """Exit status, standard output and standard error; nothing else may be left."""
        out, err = self.process.communicate(timeout=180)
        left = self.traces.gone()
        assert not left, (left, err)
        return self.process.returncode, out, err


def output(text: str, *, stdin: bool = False, beside: tuple[str, ...] = ()) -> str:
    """Standard output of a script that must succeed."""
    with Script(text, stdin=stdin, beside=beside) as script:
        status, out, err = script.end()
    assert status == 0, err
    assert "Traceback" not in err, err
    return out
