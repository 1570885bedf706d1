"""How unevenly experts are chosen: a gauge, from counts that the device keeps.

The most chosen expert of a layer over the layer's mean, for the worst layer; over a window that
ends when it has rows enough to mean something. Read between two steps, never within one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from common.observe.metrics import Tally

EVERY_S = 10.0
LEAST = 64  # mean rows of an expert in a window; with fewer, chance alone looks uneven

Counts = list[list[int]]


def skew(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> float | None:
    """The largest over all layers of the busiest expert's rows over the mean; 1 is even.

    None when a layer has not enough rows between the two counts.
    """
    worst = 0.0
    for old, new in zip(before, after, strict=True):
        rows = [b - a for a, b in zip(old, new, strict=True)]
        mean = sum(rows) / len(rows)
        if mean < LEAST:
            return None
        worst = max(worst, max(rows) / mean)
    return worst or None


class Skew:
    """One replica's."""

    def __init__(
        self,
        read: Callable[[], Counts],
        ask: Callable[[Callable[[], Counts]], Future[Counts]],
        tally: Tally,
    ) -> None:
        """`read` waits for the device; `ask` runs it in the thread that steps."""
        self._read, self._ask, self._tally = read, ask, tally
        self._before: Counts | None = None
        self._due, self._is_asking = 0.0, False

    def look(self, now: float) -> None:
        """Called often; looks every `EVERY_S`."""
        if now < self._due or self._is_asking:
            return
        self._due, self._is_asking = now + EVERY_S, True
        self._ask(self._read).add_done_callback(self._take)

    def _take(self, told: Future[Counts]) -> None:
        self._is_asking = False
        if told.exception() is not None:
            return  # the engine is over; others tell
        now = told.result()
        if self._before is None:
            self._before = now
        elif (found := skew(self._before, now)) is not None:
            self._before = now
            self._tally.set("baton_expert_skew", found)
