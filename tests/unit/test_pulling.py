"""The router and early offers: passed on at once; a pull that fails is what its pass failed of."""

from __future__ import annotations

import asyncio

import pytest

from common.contract import messages as m
from common.errors import CapacityError, HandoffRefused, InvalidRequest, ServingError, TransferError
from router.journey import Journey
from tests.support.rooms import World
from tests.unit.test_flow import collect, expected, ids, nothing_left, running, task

GONE = HandoffRefused("lease", "its ticket was aborted before its seal")


def early(**counts: int) -> World:
    world = World(**counts)
    for room in world.rooms.values():
        if room.room == "prefill":
            room.is_early = True
    return world


async def test_an_offer_goes_to_decode_while_prefill_still_works():
    world = early()
    async with running(world) as house:
        gate = world["d1"].gate(m.PullJob)
        events = await collect(Journey(task(), house))
        gate.set()
        await nothing_left(world)
    assert ids(events) == expected(5)
    names = world["d1"].names()
    assert names.index("PullJob") < names.index("DecodeJob")
    pull, job = world["d1"].last(m.PullJob), world["d1"].last(m.DecodeJob)
    assert pull.offer == job.ticket.offer and pull.reservation == job.reservation
    assert pull.producer == job.producer


@pytest.mark.parametrize(
    "turned", [CapacityError("another is pulled"), HandoffRefused("reservation", "gone")]
)
async def test_an_offer_that_decode_turns_away_is_handed_off_whole(turned):
    world = early()
    async with running(world) as house:
        world["d1"].plant(m.PullJob, turned)
        assert ids(await collect(Journey(task(), house))) == expected(5)
        await nothing_left(world)
    assert world["d1"].names().count("DecodeJob") == 1


@pytest.mark.parametrize(
    ("failure", "reserved"),
    [
        (HandoffRefused("span:state", "wrong borders"), 1),
        (TransferError("a READ failed"), 2),  # its destination may be in quarantine
        (HandoffRefused("reservation", "it ended"), 2),
    ],
)
async def test_a_pull_that_fails_is_what_its_pass_failed_of(failure, reserved):
    world = early(prefill=2, decode=1)
    async with running(world) as house:
        world["d1"].plant(m.PullJob, failure)
        for name in ("p1", "p2"):  # whichever it is that is asked first
            world[name].after_offer = [GONE]
        asked = asyncio.ensure_future(collect(Journey(task(), house)))
        async with asyncio.timeout(5):
            while not (world["p1"].after_offer == [] or world["p2"].after_offer == []):
                await asyncio.sleep(0.001)
        first = "p1" if world["p1"].after_offer == [] else "p2"
        other = "p2" if first == "p1" else "p1"
        world[other].after_offer = []
        assert ids(await asked) == expected(5)
        await nothing_left(world)
    assert world["d1"].names().count("Reserve") == reserved
    assert [world[name].names().count("PrefillJob") for name in (first, other)] == [1, 1]


async def test_a_fault_in_a_pull_is_what_its_request_ends_with():
    world = early()
    async with running(world) as house:
        world["d1"].plant(m.PullJob, ServingError("a fault of its own"))
        world["p1"].after_offer = [GONE]
        with pytest.raises(ServingError, match="a fault of its own"):
            await collect(Journey(task(), house))
        await nothing_left(world)


async def test_a_prefill_that_fails_by_itself_keeps_its_own_error():
    world = early()
    async with running(world) as house:
        world["p1"].after_offer = [InvalidRequest("the prompt is wrong")]
        with pytest.raises(ServingError, match="the prompt is wrong"):
            await collect(Journey(task(), house))
        await nothing_left(world)
