"""A room's connections: one a caller, and none to a router that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from common.contract.messages import Done, Endpoint, Ping
from common.errors import RoomLost
from common.runtime import room as rooms
from common.runtime.room import Room
from common.wire import dial

SECRET = "secret"


def described(host: str, port: int) -> Endpoint:
    return Endpoint(
        room="decode",
        id="d1",
        epoch=1,
        host=host,
        port=port,
        agent="",
        agent_metadata=b"",
        pools=(),
        model_print="m",
        layout_print="l",
    )


@contextlib.asynccontextmanager
async def listening():
    """A room that answers pings, and whom it was told lost."""
    room, lost = Room("decode", secret=SECRET), []

    async def pong(message: Ping, caller: str) -> Done:
        return Done()

    room.on(Ping, pong)
    room.on_lost = lost.append
    place = await room.open("127.0.0.1", described)
    try:
        yield room, place, lost
    finally:
        await room.close()


async def connected(place, caller: str):
    wire, _ = await dial(place.host, place.port, secret=SECRET, caller=caller)
    await wire.call(Ping(), timeout_s=5.0)
    return wire


async def until(claim) -> None:
    async with asyncio.timeout(5):
        while not claim():
            await asyncio.sleep(0.01)


async def test_a_caller_that_dials_anew_has_given_up_its_old_connection():
    async with listening() as (room, place, lost):
        old = await connected(place, "router:one")
        other = await connected(place, "router:two")
        new = await connected(place, "router:one")  # the old one is still open
        assert lost == ["router:one"]
        await asyncio.wait_for(old.closed.wait(), 5)
        await new.call(Ping(), timeout_s=5.0)
        assert lost == ["router:one"] and set(room.wires) == {"router:one", "router:two"}
        other.close()
        await until(lambda: lost == ["router:one", "router:two"])
        new.close()


async def test_a_router_that_says_nothing_for_a_leases_time_is_dropped(monkeypatch):
    monkeypatch.setattr(rooms, "SWEEP_S", 0.05)
    async with listening() as (room, place, lost):
        router = await connected(place, "router:one")
        peer = await connected(place, "prefill:p1")  # rooms speak to each other only at need
        for wire in room.wires.values():
            wire.heard_at = time.monotonic() - rooms.SILENT_S - 1
        await asyncio.wait_for(router.closed.wait(), 5)
        await until(lambda: lost == ["router:one"])
        assert not peer.closed.is_set()
        with pytest.raises(RoomLost):
            await router.call(Ping(), timeout_s=1.0)
        peer.close()


async def test_a_failed_engine_breaks_every_connection_and_refuses_new_ones():
    async with listening() as (room, place, _):
        router = await connected(place, "router:one")
        room.hang_up(KeyError("a fault"))
        await asyncio.wait_for(router.closed.wait(), 5)
        assert room.ended.is_set()
        with pytest.raises(RoomLost):
            await connected(place, "router:one")
