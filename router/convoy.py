"""Several journeys of one request: they set out in order, and only one of them waits for a place.

So a request with many prompts does not compete with itself: those that come after the first wait
for their turn behind their own, without the limit that keeps strangers from waiting for ever.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from common.contract.messages import TokenItem
from common.errors import ServingError
from router.house import House
from router.jobs import Task
from router.journey import Journey


class Convoy:
    """`set_out`, iterate its `events` once, and `turn_back` in the end."""

    def __init__(self, tasks: Sequence[Task], house: House) -> None:
        """Nothing runs yet."""
        first, *others = tasks
        later = [dataclasses.replace(task, has_begun=True) for task in others]
        self.journeys = [Journey(task, house) for task in (first, *later)]
        self._house = house
        self._leader: asyncio.Task[None] | None = None

    def set_out(self) -> None:
        """Begin with the first; each of the others follows when the one before has its place."""
        self.journeys[0].set_out()
        self._leader = self._house.spawn(self._lead())

    def turn_back(self) -> None:
        """End what is still on its way. Once is enough, twice does no harm."""
        if self._leader is not None:
            self._leader.cancel()
        for journey in self.journeys:
            journey.turn_back()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill's cache spared."""
        return sum(journey.account.cached_tokens for journey in self.journeys)

    async def events(self) -> AsyncIterator[tuple[int, TokenItem]]:
        """Events of all journeys as they come, each with its prompt's number.

        Raises:
            ServingError: one of the journeys cannot be finished.
        """
        ready: asyncio.Queue[tuple[int, TokenItem] | ServingError | None] = asyncio.Queue(256)

        async def read(prompt: int, journey: Journey) -> None:
            try:
                async for item in journey.events():
                    await ready.put((prompt, item))
                await ready.put(None)
            except ServingError as error:
                await ready.put(error)

        readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(self.journeys)]
        try:
            left = len(readers)
            while left:
                arrived = await ready.get()
                if isinstance(arrived, ServingError):
                    raise arrived
                if arrived is None:
                    left -= 1
                else:
                    yield arrived
        finally:
            for reader in readers:
                reader.cancel()

    async def _lead(self) -> None:
        before = self.journeys[0]
        for journey in self.journeys[1:]:
            await before.seated()
            journey.set_out()
            before = journey
