"""The last requests that ended, kept for the dashboard, for `baton trace` and for spans.

Knows moments and counts, never words. Bounded: what is older is forgotten.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.tracing import trace_of

GOOD = ("stop", "length", "tool_calls")  # outcomes of an answer that is whole
KEPT = 4096  # requests, some 3 kB each

# Where each part that the router sees is spent; what a room tells of lies within one of them.
STAGES = {
    "wait": "router",
    "encode": "encoder",
    "prefill": "prefill",
    "hand_off": "decode",
    "decode": "decode",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stretch of a request: seconds since it began, and seconds long.

    `within` names the part it lies in, as a room told it; empty for what the router saw itself.
    `replica` did the work, or was to do it; `error` is the code of what ended the part early.
    """

    name: str
    at_s: float
    long_s: float
    replica: str = ""
    within: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stumble:
    """A pass that had to be made again: `name` is reprefill or replay, `why` an error's code."""

    name: str
    at_s: float
    room: str
    replica: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A request that ended. `began` is Unix time; `outcome` a finish reason or an error's code."""

    request: str
    header: str = ""  # the id on the reply: several prompts of one call have one
    client: str = ""  # what the client calls it
    trace: str = ""  # the traceparent its rooms were told
    outcome: str
    began: float
    total_s: float
    first_token_s: float | None
    prompt_tokens: int
    completion_tokens: int
    parts: tuple[Part, ...]
    stumbles: tuple[Stumble, ...] = ()

    @property
    def is_failed(self) -> bool:
        """Whether it ended with an error; that its reader left is none."""
        return self.outcome not in (*GOOD, "cancelled")

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON; of the trace context only the trace's id."""
        return dataclasses.asdict(self) | {"trace": trace_of(self.trace)}


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

    def find(self, name: str) -> list[Past]:
        """Requests of this id, newest first: ours, the reply's, the client's or the trace's."""
        return [past for past in reversed(self._pasts) if name and name in _names(past)]

    def span_s(self, now: float) -> tuple[int, float]:
        """How many requests are kept, and how long ago the oldest of them began."""
        return len(self._pasts), now - self._pasts[0].began if self._pasts else 0.0


def _names(past: Past) -> tuple[str, ...]:
    return (past.request, past.header, past.client, trace_of(past.trace))
