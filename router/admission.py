"""The bounded queue in front of the rooms: first come, first served, but for a stated priority.

While nobody waits, everyone tries at once. From the first that found no room, only the head tries,
so that a large request is not overtaken for ever by small ones. Who comes when the queue is full,
or has waited too long, is told to come back later. Knows nothing of what a reservation is.

A step of priority is worth so many seconds of waiting, and only `STEPS` of them count: nobody is
overtaken by who comes later than the difference between two priorities, so nobody starves.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from common.config.settings import RouterSettings
from common.errors import CapacityError
from router.bell import Bell

T = TypeVar("T")
Attempt = Callable[[], Awaitable[T | None]]
POLL_S = 0.25  # the head tries again after this even when nothing rang
STEPS = 10  # of priority, upwards and downwards


@dataclass(eq=False, slots=True, kw_only=True)
class _Turn:
    key: float  # the least is the head
    since: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """One queue per router."""

    def __init__(self, settings: RouterSettings, bell: Bell) -> None:
        """`bell` rings when a replica's load changed or a request ended."""
        self._limit = max(1, settings.queue_limit)
        self._wait_s = settings.queue_wait_s
        self._step_s = settings.priority_s
        self._bell = bell
        self._queue: list[_Turn] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """Seconds that the one who waits longest has waited."""
        now = asyncio.get_running_loop().time()
        return max((now - turn.since for turn in self._queue), default=0.0)

    async def enter(
        self,
        attempt: Attempt[T],
        *,
        priority: int = 0,
        has_begun: bool = False,
        urgent: bool = False,
    ) -> T:
        """Repeat `attempt` until it gives something, in turn with others.

        `priority`: the lower, the earlier. `has_begun`: part of a request that has a place already;
        it is never refused here. `urgent`: a request that has begun to answer; it goes to the front
        past the limit.

        Raises:
            CapacityError: the queue is full, or `queue_wait_s` passed.
        """
        if len(self._queue) >= self._limit and not (urgent or has_begun):
            raise CapacityError(
                f"{len(self._queue)} requests wait already, the most allowed; try again later"
            )
        try:
            async with asyncio.timeout(None if has_begun else self._wait_s):
                if not self._queue and (got := await attempt()) is not None:
                    return got
                return await self._wait(attempt, -math.inf if urgent else self._key(priority))
        except TimeoutError:
            raise CapacityError(
                f"no decode replica had room within {self._wait_s:g} s; try again later"
            ) from None

    def _key(self, priority: int) -> float:
        steps = max(-STEPS, min(STEPS, priority))
        return asyncio.get_running_loop().time() + steps * self._step_s

    async def _wait(self, attempt: Attempt[T], key: float) -> T:
        turn = _Turn(key=key, since=asyncio.get_running_loop().time())
        bisect.insort_right(self._queue, turn, key=lambda one: one.key)
        try:
            return await self._at_the_head(turn, attempt)
        finally:
            self._queue.remove(turn)
            if self._queue:
                self._queue[0].woken.set()

    async def _at_the_head(self, turn: _Turn, attempt: Attempt[T]) -> T:
        while True:
            while self._queue[0] is not turn:
                turn.woken.clear()
                await turn.woken.wait()
            if (got := await attempt()) is not None:
                return got
            await self._bell.wait(POLL_S)
