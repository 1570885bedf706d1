"""Leaving, as a plain process and as Serve's replica: told, awaited, bounded."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from common.contract.messages import Endpoint, Holdings, Load
from common.runtime.drain import QUIET_S, drain
from common.runtime.replica import RoomReplica


class Wires:
    """What the drain needs of a room's socket side."""

    def __init__(self) -> None:
        self.is_leaving, self.ended, self.told = False, asyncio.Event(), []

    def tell_all(self, message) -> None:
        self.told.append(message)


class Busy:
    """A room that has work until `until`, of one sort."""

    def __init__(self, for_s: float, sort: str = "slots") -> None:
        self.room, self.until, self.sort = Wires(), time.monotonic() + for_s, sort
        self.closed_at = 0.0

    def left(self, sort: str) -> int:
        return int(self.sort == sort and time.monotonic() < self.until)

    async def open(self, host: str) -> Endpoint:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed_at = time.monotonic()

    async def load(self, message, caller: str) -> Load:
        return Load(epoch=1, leaving=self.room.is_leaving, queued=self.left("queued"))

    async def holdings(self, message, caller: str) -> Holdings:
        held = {sort: self.left(sort) for sort in ("slots", "tickets", "embeddings")}
        return Holdings(room="decode", id="d", epoch=1, **held)


async def test_routers_are_told_at_once_and_the_room_goes_when_it_is_idle():
    room, began = Busy(0.0), time.monotonic()
    assert await drain(room, 10.0)
    assert [message.leaving for message in room.room.told] == [True]
    assert QUIET_S <= time.monotonic() - began < 5.0


async def test_every_sort_of_work_is_waited_for():
    for sort in ("queued", "slots", "tickets", "embeddings"):
        room = Busy(0.4, sort)
        assert await drain(room, 10.0), sort
        assert time.monotonic() >= room.until, sort


async def test_work_that_does_not_end_is_left_after_the_drain_time():
    began = time.monotonic()
    assert not await drain(Busy(60.0), 0.3)
    assert time.monotonic() - began < 5.0


async def test_a_room_whose_engine_failed_is_not_waited_for():
    room, began = Busy(60.0), time.monotonic()
    room.room.ended.set()
    assert not await drain(room, 30.0)
    assert time.monotonic() - began < 5.0


async def test_serves_replica_drains_before_it_closes():
    room = Busy(0.4, "tickets")
    replica = SimpleNamespace(_room=room, _drain_s=10.0)  # a real one would be ended twice
    await RoomReplica.__del__(replica)
    assert room.closed_at >= room.until
