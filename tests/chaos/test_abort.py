"""Cancels at every edge of the journey, a storm of them, and a client that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
import pytest_asyncio

from router import answer as answers
from router import outbox
from router.journey import Journey
from tests.chaos.test_endings import rooms, until
from tests.support.prompts import image, question
from tests.support.relay import Relay

pytestmark = pytest.mark.asyncio(loop_scope="module")
FREE_S = 5.0  # what is promised is one second; the rest is for slow machines

# A kind of message, and whether the client leaves before it is answered or right after.
EDGES = [
    (room, kind, when)
    for room, kind in (
        ("decode", "Reserve"),
        ("encoder", "EncodeJob"),
        ("prefill", "PrefillJob"),
        ("decode", "DecodeJob"),
    )
    for when in ("before", "after")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay():
    async with rooms(encoder=1) as running:
        yield running


def everything(relay: Relay) -> int:
    """Slots, pages, rows and tickets that anybody holds, also what no inventory counts."""
    total = 0
    for room in (*relay.prefills, *relay.decodes):
        total += room.memory.slots.held + room.memory.pages.held + room.receiver.quarantined
    for room in relay.prefills:
        total += room.arena.held + room.owner.held()
    for room in relay.encoders:
        total += room.engine.counts()[2] + room.owner.held()
    return total


async def free_soon(relay: Relay) -> float:
    began = time.monotonic()
    await until(lambda: everything(relay) == 0, within_s=FREE_S)
    return time.monotonic() - began


@pytest.mark.parametrize(("room", "kind", "when"), EDGES)
async def test_a_client_that_leaves_at_an_edge_frees_every_room(relay, room, kind, when):
    served = getattr(relay, f"{room}s")[0].room
    kept = dict(served._handlers)
    here = next(known for known in kept if known.__name__ == kind)
    reached = asyncio.Event()

    async def at_the_edge(message, caller):
        if when == "before":
            reached.set()
        reply = await kept[here](message, caller)
        reached.set()
        return reply

    served._handlers[here] = at_the_edge
    try:
        task = relay.task(question(1), images=[image()], offsets=[40], max_tokens=60, n=2)
        running = asyncio.ensure_future(relay.run(task))
        await asyncio.wait_for(reached.wait(), 10)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        served._handlers.update(kept)
    await free_soon(relay)


@pytest.mark.parametrize("tokens", [1, 2, 30])
async def test_a_client_that_leaves_in_mid_stream_frees_every_room(relay, tokens):
    async with Journey(relay.task(question(1), max_tokens=100, n=2), relay.house) as journey:
        async for _ in journey.events():
            if len(journey.answer.log[0]) >= tokens:
                break
    await free_soon(relay)


async def test_after_two_hundred_cancels_in_a_second_nothing_is_held(relay):
    kinds = [{"images": [image()], "offsets": [40]}, {"n": 2}, {}, {"canary": True}]
    tasks = [
        relay.task(question(at % 7, 40 + at), max_tokens=50, **kinds[at % len(kinds)])
        for at in range(200)
    ]
    running = [asyncio.ensure_future(relay.run(task)) for task in tasks]
    for at, one in enumerate(running):
        if at % 2 == 0:
            await asyncio.sleep(0.01)  # 200 in about a second
        one.cancel()
    gone = await asyncio.gather(*running, return_exceptions=True)
    assert sum(isinstance(end, asyncio.CancelledError) for end in gone) > 150
    await free_soon(relay)
    for room in (*relay.prefills, *relay.decodes):
        room.memory.slots.check_integrity()
        room.memory.pages.check_integrity()
    assert len((await relay.run(relay.task(question(1), max_tokens=5))).ids()) == 5
    await free_soon(relay)


async def test_a_client_that_does_not_read_makes_decode_pause_and_is_then_given_up(
    relay, monkeypatch
):
    monkeypatch.setattr(answers, "PATIENCE_S", 1.5)
    decode = relay.decodes[0].engine
    counted = "baton_slow_readers_total"
    before = relay.house.tally.snapshot().get(counted, 0)
    async with Journey(relay.task(question(1), max_tokens=2000), relay.house) as journey:
        box = journey.answer.outbox
        await until(lambda: any(held.is_paused for held in decode.helds()), within_s=20.0)
        await asyncio.sleep(0.2)  # frames that were on their way
        waiting = len(box._items)
        assert waiting <= 256
        await asyncio.sleep(0.3)
        assert len(box._items) == waiting and decode.helds()
        short = await relay.run(relay.task(question(2), max_tokens=5))  # others go on
        assert len(short.ids()) == 5
        await until(lambda: not decode.helds())
        assert relay.house.tally.snapshot()[counted] == before + 1
    await free_soon(relay)


async def test_a_client_that_catches_up_gets_the_same_answer_as_one_that_reads_at_once(
    relay, monkeypatch
):
    monkeypatch.setattr(outbox, "STOP_AT", 40)
    monkeypatch.setattr(outbox, "GO_AT", 10)
    ask = {"max_tokens": 100, "temperature": 1.0, "seed": 2}
    whole = (await relay.run(relay.task(question(1), **ask))).ids()
    decode, got = relay.decodes[0].engine, []
    async with Journey(relay.task(question(1), **ask), relay.house) as journey:
        await until(lambda: any(held.is_paused for held in decode.helds()), within_s=20.0)
        async for item in journey.events():
            got += [token.id for token in item.tokens]
    assert got == whole
    await free_soon(relay)
