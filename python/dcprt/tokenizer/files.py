"""Reading the small files beside a tokenizer, each of which may be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcprt.errors import ModelError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where the file is missing.

    Raises:
        ModelError: the file cannot be read or has no JSON object.
    """
    text = read_text(path)
    try:
        values = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is no JSON object.")
    return values


def read_text(path: Path) -> str | None:
    """The text of a file, or None where it is missing.

    Raises:
        ModelError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {error}.") from error


def special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; the first source that has one counts."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            token = token_text(source.get(name))
            if token is not None:
                found.setdefault(name, token)
    return found


def token_text(token: Any) -> str | None:
    """The text of a token as configurations write it: a string, or an object with the content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
