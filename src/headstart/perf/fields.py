"""Typed reading of a model's description, JSON or GGUF metadata. Owns the errors; knows no field by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.hub import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """Null counts as absent. Errors name the field and, by `where`, the file."""

    values: Mapping[str, Any]
    where: str

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 40) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ModelError(f"{self.where}: {key} is {value!r}, expected a whole number of at least {low}")
        if value > high:
            raise ModelError(f"{self.where}: {key} is {value}, but at most {high} can be: the file is damaged")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} is {value!r}, expected a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} is {value!r}, expected true or false")
        return value

    def _value(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None and default is None:
            raise ModelError(f"{self.where}: {key} is missing: the file is no complete model")
        return default if value is None else value
