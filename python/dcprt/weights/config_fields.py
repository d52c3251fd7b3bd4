"""One JSON object of a checkpoint, read field by field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dcprt.errors import ModelError


class Fields:
    """One JSON object; a complaint names file and field. A field that is `null` counts as missing."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def wrong(self, field: str, wanted: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{field} must be {wanted}, but is {self.values.get(field)!r}.")

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer; `null` counts as missing."""
        value = self._given(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, "a positive integer")
        return value

    def count(self, field: str, default: int = 0) -> int:
        """An integer that may be 0; `null` counts as missing."""
        value = self.values.get(field)
        if value is None or (value == 0 and not isinstance(value, bool)):
            return default if value is None else 0
        return self.integer(field)

    def number(self, field: str, default: float | None = None) -> float:
        """A positive finite number; `null` counts as missing."""
        value = self._given(field, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(field, "a positive number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._given(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def text(self, field: str, default: str) -> str:
        value = self._given(field, default)
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def ids(self, field: str) -> tuple[int, ...]:
        """A token id or a list of them; none where the field is missing or null."""
        value = self.values.get(field)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
            raise self.wrong(field, "a token id or a list of token ids")
        return tuple(found)

    def indices(self, field: str) -> tuple[int, ...]:
        """A list of layer numbers; empty where the field is missing or null."""
        value = self.values.get(field)
        found = [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
            raise self.wrong(field, "a list of layer numbers")
        return tuple(found)

    def only(self, field: str, served: Any, reason: str) -> None:
        """Refuses any value but `served`, null and none.

        Raises:
            ModelError: names the field, its value and the reason.
        """
        if self._has(field) and self.values[field] != served:
            raise ModelError(f"{self.path}: {self.prefix}{field} is {self.values[field]!r}; {reason}.")

    def object(self, field: str) -> Fields | None:
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return Fields(self.path, value, f"{self.prefix}{field}.")

    def _has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def _given(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: the field {self.prefix}{field} is missing.")
        return value


def read_json(path: Path) -> Fields:
    """The object in a file.

    Raises:
        ModelError: no such file, no JSON, or no object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is no JSON object.")
    return Fields(path, values)
