"""Gate: how far a READ may go into memory that its owner is still writing.

Whoever hears from the owner raises it, portion by portion, or fails it; the READ asks how many of
its pieces may be posted, and waits here while none may. Knows no owner and no memory.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence


class Gate:
    """Closed until it is raised."""

    def __init__(self, portion_of: Sequence[int]) -> None:
        """`portion_of[n]`: the portion that piece n is of; pieces follow each other by portion."""
        self._portion_of = portion_of
        self._changed = threading.Condition()
        self._portions = 0
        self._failure: Exception | None = None
        self.opened_at = 0.0  # when the last piece could be posted (`time.perf_counter`)

    def raise_to(self, portions: int) -> None:
        """So many portions are final, the first ones; fewer than before changes nothing."""
        with self._changed:
            before, self._portions = self._count(), max(self._portions, portions)
            if before < len(self._portion_of) == self._count():
                self.opened_at = time.perf_counter()
            self._changed.notify_all()

    def fail(self, failure: Exception) -> None:
        """No more will become final; where all was, this changes nothing."""
        with self._changed:
            if self._count() < len(self._portion_of):
                self._failure = failure
            self._changed.notify_all()

    def pieces(self) -> int:
        """How many pieces may be READ, the first ones.

        Raises:
            Exception: what it was failed with.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._count()

    def wait(self, beyond: int, timeout_s: float) -> None:
        """Until more than `beyond` pieces may be READ, or it failed, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._count() > beyond, timeout_s
            )

    def _count(self) -> int:
        return bisect_left(self._portion_of, self._portions)
