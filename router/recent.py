"""The last requests that ended, kept for the dashboard.

Knows moments and counts, never words. Bounded: what is older is forgotten.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEPT = 256  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stretch of a request: seconds since it began, and seconds long.

    `within` names the part it lies in, as a room told it; empty for what the router saw itself.
    """

    name: str
    at_s: float
    long_s: float
    replica: str = ""
    within: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A request that ended. `began` is Unix time; `outcome` a finish reason or an error's code."""

    request: str
    client: str = ""  # what the client calls it
    trace: str = ""  # the client's traceparent
    outcome: str
    began: float
    total_s: float
    first_token_s: float | None
    prompt_tokens: int
    completion_tokens: int
    parts: tuple[Part, ...]

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON; without the trace context."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "trace"}


class Recent:
    """The newest requests, and who wants to hear of each."""

    def __init__(self, kept: int = KEPT) -> None:
        """Remember `kept` of them."""
        self._pasts: deque[Past] = deque(maxlen=kept)
        self.listeners: list[Callable[[Past], None]] = []
        self.count = 0

    def add(self, past: Past) -> None:
        """A request ended."""
        self._pasts.append(past)
        self.count += 1
        for listener in self.listeners:
            listener(past)

    def newest(self, most: int) -> list[Past]:
        """The last ones, newest first."""
        return list(self._pasts)[-most:][::-1]

    def find(self, name: str) -> Past | None:
        """The newest request of this id, ours or the client's."""
        matches = (past for past in reversed(self._pasts) if name in (past.request, past.client))
        return next(matches, None)
