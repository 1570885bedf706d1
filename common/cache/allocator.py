"""Numbered places with reference counts: pages of latents, slots of state.

Deals in numbers only. It has never seen a tensor, a request or a lease; who writes into a place,
and until when, is known elsewhere. Safe to call from any thread.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

from common.errors import CapacityError


class Allocator:
    """Hands out the numbers 0 .. total - 1, lowest first, so that neighbours stay neighbours."""

    def __init__(self, total: int) -> None:
        """Start with every number free."""
        if total < 0:
            raise ValueError(f"an allocator cannot hold {total} places; give zero or more")
        self.total = total
        self._free = list(range(total))  # a heap
        self._counts = [0] * total
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """How many numbers `take` could hand out now."""
        return len(self._free)

    @property
    def held(self) -> int:
        """How many numbers have at least one holder."""
        return self.total - len(self._free)

    def take(self, n: int) -> tuple[int, ...]:
        """Hand out `n` numbers with one holder each, ascending; all or nothing.

        Raises:
            CapacityError: fewer than `n` are free.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} places; ask for zero or more")
        with self._lock:
            if n > len(self._free):
                raise CapacityError(
                    f"{n} places are wanted, {len(self._free)} of {self.total} are free; try later"
                )
            ids = tuple(heapq.heappop(self._free) for _ in range(n))
            for number in ids:
                self._counts[number] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """Add one holder to each number; every one must be held already."""
        wanted = tuple(ids)
        with self._lock:
            self._refuse_free(wanted, "shared")
            for number in wanted:
                self._counts[number] += 1

    def give(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Take one holder off each number; returns those that became free."""
        wanted = tuple(ids)
        with self._lock:
            self._refuse_free(wanted, "given back")
            freed = []
            for number in wanted:
                if self._counts[number] == 0:  # named twice in one call
                    raise ValueError(f"place {number} is given back more often than it is held")
                self._counts[number] -= 1
                if self._counts[number] == 0:
                    heapq.heappush(self._free, number)
                    freed.append(number)
        return tuple(freed)

    def holders(self, number: int) -> int:
        """How many hold this number."""
        return self._counts[number]

    def check_integrity(self) -> None:
        """Raise AssertionError when the free list and the counts tell different stories."""
        with self._lock:
            assert len(set(self._free)) == len(self._free), "a number is free twice"
            assert all(count >= 0 for count in self._counts), "a count is negative"
            free = {number for number, count in enumerate(self._counts) if count == 0}
            assert free == set(self._free), "the free list and the counts disagree"

    def _refuse_free(self, ids: tuple[int, ...], verb: str) -> None:
        for number in ids:
            if not 0 <= number < self.total or self._counts[number] == 0:
                raise ValueError(f"place {number} is free and cannot be {verb}")
