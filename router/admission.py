"""The bounded queue in front of the rooms: first come, first served.

While nobody waits, everyone tries at once. From the first that found no room, only the head tries,
so that a large request is not overtaken for ever by small ones. Who comes when the queue is full,
or has waited too long, is told to come back later. Knows nothing of what a reservation is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.config.settings import RouterSettings
from common.errors import CapacityError
from router.bell import Bell

T = TypeVar("T")
POLL_S = 0.25  # the head tries again after this even when nothing rang


class Admission:
    """One queue per router."""

    def __init__(self, settings: RouterSettings, bell: Bell) -> None:
        """`bell` rings when a replica's load changed or a request ended."""
        self._limit = max(1, settings.queue_limit)
        self._wait_s = settings.queue_wait_s
        self._bell = bell
        self._queue: deque[asyncio.Event] = deque()
        self._since: dict[asyncio.Event, float] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """Seconds that the one who waits longest has waited."""
        if not self._since:
            return 0.0
        return asyncio.get_running_loop().time() - min(self._since.values())

    async def enter(self, attempt: Callable[[], Awaitable[T | None]], *, urgent: bool = False) -> T:
        """Repeat `attempt` until it gives something, in turn with others.

        `urgent` goes to the front past the limit: a request that has begun to answer.

        Raises:
            CapacityError: the queue is full, or `queue_wait_s` passed.
        """
        if len(self._queue) >= self._limit and not urgent:
            raise CapacityError(
                f"{len(self._queue)} requests wait already, the most allowed; try again later"
            )
        try:
            async with asyncio.timeout(self._wait_s):
                if not self._queue and (got := await attempt()) is not None:
                    return got
                return await self._wait(attempt, urgent)
        except TimeoutError:
            raise CapacityError(
                f"no decode replica had room within {self._wait_s:g} s; try again later"
            ) from None

    async def _wait(self, attempt: Callable[[], Awaitable[T | None]], urgent: bool) -> T:
        turn = asyncio.Event()
        self._since[turn] = asyncio.get_running_loop().time()
        if urgent:
            self._queue.appendleft(turn)
        else:
            self._queue.append(turn)
        try:
            return await self._at_the_head(turn, attempt)
        finally:
            self._queue.remove(turn)
            del self._since[turn]
            if self._queue:
                self._queue[0].set()

    async def _at_the_head(
        self, turn: asyncio.Event, attempt: Callable[[], Awaitable[T | None]]
    ) -> T:
        while True:
            while self._queue[0] is not turn:
                turn.clear()
                await turn.wait()
            if (got := await attempt()) is not None:
                return got
            await self._bell.wait(POLL_S)
