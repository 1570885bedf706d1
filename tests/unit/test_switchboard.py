"""Who can be spoken to: seats that come, go, fall silent and come back in a new epoch."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from common.config.settings import RouterSettings, Settings
from common.contract import messages as m
from common.errors import RoomLost
from router.bell import Bell
from router.house import House
from router.seats import Seat, Seats, seats_of
from tests.support.rooms import SECRET, World, until

FAST = RouterSettings(heartbeat_s=0.05, silent_s=0.3)


@contextlib.asynccontextmanager
async def watching(world: World, secret: str = SECRET):
    await world.open()
    seats = Seats()
    seats.fill("line", seats_of(world.addresses()))
    house = House(Settings(router=FAST), seats, secret=secret, name="r1")
    house.start()
    try:
        yield house, seats
    finally:
        await house.stop()
        await world.close()


def ids(house: House) -> list[str]:
    return [replica.id for replica in house.board.connected()]


async def test_every_seat_is_dialled_and_known_by_its_own_name():
    async with watching(World(encoder=1, prefill=2, decode=1)) as (house, _):
        await until(lambda: ids(house) == ["d1", "e1", "p1", "p2"])
        assert [r.id for r in house.board.present("prefill")] == ["p1", "p2"]
        assert house.board.silent() == []


async def test_a_replica_that_does_not_answer_is_silent_and_loses_its_calls():
    world = World(decode=1)
    async with watching(world) as (house, _):
        await until(lambda: ids(house) == ["d1"])
        (replica,) = house.board.connected()
        world["d1"].gate(m.Inventory)
        call = asyncio.create_task(replica.call(m.Inventory(), timeout_s=30))
        await asyncio.sleep(0)
        world["d1"].gate(m.Ping)
        await until(lambda: house.board.silent() == ["d1"], 2.0)
        with pytest.raises(RoomLost, match="decode d1"):
            await call


async def test_a_replica_that_restarts_is_back_in_a_new_epoch():
    world = World(decode=1)
    async with watching(world) as (house, _):
        await until(lambda: ids(house) == ["d1"])
        before = house.board.connected()[0].epoch
        await world["d1"].die()
        await until(lambda: house.board.silent() == ["d1"])
        await world["d1"].rise()
        await until(lambda: ids(house) == ["d1"], 2.0)
        assert house.board.connected()[0].epoch > before


async def test_a_seat_that_leaves_gets_no_new_work_but_ends_what_it_has():
    world = World(decode=1)
    async with watching(world) as (house, seats):
        await until(lambda: ids(house) == ["d1"])
        (replica,) = house.board.connected()
        gate = world["d1"].gate(m.Inventory)
        call = asyncio.create_task(replica.call(m.Inventory(), timeout_s=5))
        await until(lambda: replica.jobs == 1)
        seats.fill("line", [])
        await until(lambda: house.board.present("decode") == [])
        assert ids(house) == ["d1"]
        gate.set()
        assert isinstance(await call, m.Holdings)
        await until(lambda: ids(house) == [])
        assert house.board.silent() == []


async def test_a_seat_that_comes_later_is_found():
    world = World(encoder=1, prefill=1)
    async with watching(world) as (house, seats):
        await until(lambda: len(ids(house)) == 2)
        late = World(decode=1)
        await late.open()
        seats.fill("serve", [Seat(key="x", host="127.0.0.1", port=late["d1"].port)])
        await until(lambda: "d1" in ids(house))
        await late.close()


async def test_a_seat_where_nobody_listens_is_silent_under_its_key():
    world = World(decode=1)
    async with watching(world) as (house, seats):
        seats.fill("serve", [Seat(key="nobody", host="127.0.0.1", port=1)])
        await until(lambda: "nobody" in house.board.silent())


async def test_another_secret_gets_no_replica():
    async with watching(World(decode=1), secret="wrong") as (house, _):
        await asyncio.sleep(0.15)
        assert ids(house) == []


async def test_loads_arrive_and_ring_the_bell():
    world = World(decode=1)
    async with watching(world) as (house, _):
        await until(lambda: ids(house) == ["d1"])
        assert house.seen("decode")[0][0].free_slots == 8
        started = asyncio.get_running_loop().time()
        await house.bell.wait(5.0)
        assert asyncio.get_running_loop().time() - started < 4.0


@pytest.mark.parametrize("text", ["127.0.0.1", "host:", ":80", "host:http"])
def test_an_address_without_a_port_is_refused(text):
    with pytest.raises(ValueError, match="not host:port"):
        seats_of(text)


def test_addresses_are_read_in_order():
    assert [(s.host, s.port) for s in seats_of("a:1, b:2,")] == [("a", 1), ("b", 2)]


def test_a_dead_replica_leaves_its_group_alone():
    seats = Seats()
    seats.fill("a", seats_of("h:1,h:2"))
    seats.fill("b", seats_of("h:3"))
    seats.remove("a", "h:1")
    seats.remove("a", "unknown")
    assert sorted(seats.all()) == ["h:2", "h:3"]


async def test_a_cancel_that_meets_the_end_of_a_wait_is_a_cancel():
    bell = Bell()

    async def wait_always() -> None:
        while True:
            await bell.wait(0.01)

    task = asyncio.create_task(wait_always())
    await asyncio.sleep(0.005)
    time.sleep(0.02)  # noqa: ASYNC251 - the wait's time is over, but nobody could tell it yet
    bell.ring()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1.0)
    assert done and task.cancelled()
