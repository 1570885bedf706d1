"""Read a JSON object by key, and say in one sentence what is wrong with it.

Knows nothing of what the keys mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from common.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Table:
    """One JSON object; `where` names the file and the path of keys that leads to it."""

    where: str
    values: Mapping[str, Any]

    def table(self, key: str) -> Table:
        """The object under `key`."""
        return Table(f"{self.where}: {key}", self.need(key, dict))

    def need(self, key: str, kind: type) -> Any:
        """The value under `key`, which must be there."""
        if self.values.get(key) is None:
            raise CheckpointError(f"{self.where} lacks `{key}`; take the file of the release")
        return self.get(key, kind, None)

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value under `key`, or `default` where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(key, value, f"of type {kind.__name__}")
        return value

    def positive(self, key: str) -> int:
        """A whole number above zero."""
        value: int = self.need(key, int)
        if value <= 0:
            self.refuse(key, value, "above 0")
        return value

    def only(self, key: str, supported: Any) -> None:
        """Refuse any value of `key` but `supported`; absent counts as supported."""
        value = self.values.get(key)
        if value is not None and value != supported:
            self.refuse(key, value, f"{supported!r}, the only form implemented")

    def refuse(self, key: str, value: Any, allowed: str) -> NoReturn:
        """Raise with the value and what it must be."""
        raise CheckpointError(f"{self.where}: `{key}` is {value!r}; it must be {allowed}")
