"""Endings nobody planned: engines that fail, messages that are lost, routers that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import jsonschema
import pytest

from common.config.settings import Settings
from common.errors import ServingError
from router import jobs
from router.journey import Journey
from tests.support.golden import NANO
from tests.support.prompts import image, question
from tests.support.relay import Relay, changed, in_process
from tests.support.walks import TOKENIZER, read, schema_form

ASK = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "n": 2}


def rooms(encoder: int = 0, prefill: int = 1, decode: int = 1):
    settings = changed(
        Settings(),
        model={"path": str(NANO)},
        router={"heartbeat_s": 0.2, "silent_s": 2.0},
        prefill={"pages": 256},
        decode={"pages": 256},
    )
    return in_process(settings, encoder=encoder, prefill=prefill, decode=decode)


def age(room, by_s: float = 31.0) -> None:
    """Let a lease's time pass for a room's tickets."""
    room.owner._clock = lambda: time.monotonic() + by_s


async def until(claim, within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < end, f"not within {within_s:g} s"
        await asyncio.sleep(0.01)


async def ids(relay: Relay, **more) -> list[list[int]]:
    reply = await asyncio.wait_for(relay.run(relay.task(question(1), **(ASK | more))), 60)
    return [reply.ids(choice) for choice in range(len(reply.tokens))]


def fault(*_: object, **__: object) -> None:
    raise KeyError("a fault that nobody planned for")


async def test_an_answer_whose_decode_engine_fails_continues_elsewhere_token_for_token():
    async with rooms(decode=2) as relay:
        whole = await ids(relay)
        got: list[list[int]] = [[], []]
        async with Journey(relay.task(question(1), **ASK), relay.house) as journey:
            async for item in journey.events():
                got[item.choice] += [token.id for token in item.tokens]
                if len(journey.answer.log[0]) == 8:
                    (busy,) = [r for r in relay.house.board.present("decode") if r.followers]
                    room = next(r for r in relay.decodes if r.room.id == busy.id)
                    room.engine._model = None
        assert got == whole
        assert room.room.ended.is_set() and not room.room.wires
        assert relay.house.tally.snapshot()['baton_replays_total{died="decode"}'] == 1
        await relay.nothing_left()


async def test_a_formed_answer_continues_elsewhere_at_its_place_in_the_grammar():
    form = {"type": "array", "items": {"enum": ["grün", 12, None]}, "minItems": 9, "maxItems": 9}
    grammar = schema_form(form).grammar
    async with rooms(decode=2) as relay:
        whole = await ids(relay, grammar=grammar, max_tokens=90, stop_ids=(TOKENIZER.end_of_msg,))
        task = relay.task(
            question(1),
            **(ASK | {"grammar": grammar, "max_tokens": 90, "stop_ids": (TOKENIZER.end_of_msg,)}),
        )
        got: list[list[int]] = [[], []]
        async with Journey(task, relay.house) as journey:
            async for item in journey.events():
                got[item.choice] += [token.id for token in item.tokens]
                if len(journey.answer.log[0]) == 8:
                    (busy,) = [r for r in relay.house.board.present("decode") if r.followers]
                    room = next(r for r in relay.decodes if r.room.id == busy.id)
                    room.engine._model = None
        assert got == whole and got[0] != got[1]
        assert room.room.ended.is_set()
        for answer in got:
            jsonschema.validate(json.loads(read(answer, True).content), form)


async def test_a_fault_in_a_transfer_thread_is_a_death_and_no_hang():
    async with rooms(encoder=1, prefill=2, decode=2) as relay:
        picture = {"images": [image()], "offsets": [40]}
        whole = await ids(relay, **picture)
        first = relay.prefills[0], relay.decodes[0]
        first[0].puller._fetch = fault
        first[1].intake.take = fault
        for _ in range(4):  # idle replicas are equals, so that each may be the first choice
            assert await ids(relay, **picture) == whole
            if all(room.room.ended.is_set() for room in first):
                break
        assert first[1].room.ended.is_set() or first[0].room.ended.is_set()
        await relay.nothing_left()


async def test_a_fault_after_the_read_ends_that_request_alone():
    async with rooms() as relay:
        relay.decodes[0].intake.tamper = fault
        with pytest.raises(ServingError, match="a fault of its own"):
            await ids(relay)
        relay.decodes[0].intake.tamper = None
        assert len((await ids(relay))[0]) == ASK["max_tokens"]
        await relay.nothing_left()


async def test_a_lost_release_costs_a_lease_and_nothing_more():
    async with rooms() as relay:
        relay.decodes[0].room.peers.release = lambda *_: None
        await ids(relay)
        assert relay.prefills[0].owner.held() == 1
        age(relay.prefills[0])
        await relay.nothing_left(within_s=4.0)


async def test_a_ticket_nobody_reads_ends_with_its_lease_also_after_its_requests_deadline():
    async with rooms() as relay:
        job = jobs.prefill(relay.task(question(1)), "unread", None, 0.3)
        await asyncio.wrap_future(relay.prefills[0].engine.submit(job))
        await asyncio.sleep(0.8)
        assert relay.prefills[0].owner.held() == 1  # computed in time: the lease decides now
        age(relay.prefills[0])
        await relay.nothing_left(within_s=4.0)


async def test_rooms_free_everything_within_a_lease_of_a_routers_death():
    async with rooms(encoder=1) as relay:
        relay.prefills[0].engine._settings = relay.prefills[0].engine._settings.__class__(
            pages=256, step_tokens=64, max_batch=1
        )
        picture = {"images": [image()], "offsets": [40]}
        tasks = [relay.task(question(at, 400), **(ASK | picture)) for at in range(8)]
        running = [asyncio.ensure_future(relay.run(task)) for task in tasks]
        await until(lambda: any(work.stage == "published" for work in works(relay)))
        rooms_of = [*relay.encoders, *relay.prefills, *relay.decodes]
        for replica in relay.house.board.connected():  # no cancel leaves a router that died
            replica.call = gone
            replica.wire.close()
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for room in (*relay.encoders, *relay.prefills):
            age(room)
        await until(lambda: not works(relay), within_s=6.0)
        await until(lambda: all(held_by(room) == 0 for room in rooms_of), within_s=6.0)


async def gone(*_: object, **__: object):
    raise asyncio.CancelledError


def works(relay: Relay) -> list:
    return relay.prefills[0].engine.works()


def held_by(room) -> int:
    if hasattr(room, "memory"):
        return room.memory.slots.held + room.memory.pages.held
    return room.owner.held() + room.engine.counts()[2]


async def test_a_cancel_while_embeddings_are_fetched_frees_rows_slot_and_pages():
    async with rooms(encoder=1) as relay:
        prefill = relay.prefills[0]
        claim = prefill.puller._claim
        waiting = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*arguments):
            loop.call_soon_threadsafe(waiting.set)
            time.sleep(0.5)
            return claim(*arguments)

        prefill.puller._claim = slow
        task = relay.task(question(1), images=[image()], offsets=[40])
        running = asyncio.ensure_future(relay.run(task))
        await waiting.wait()
        assert prefill.arena.held > 0
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await relay.nothing_left(within_s=5.0)
        await until(lambda: prefill.arena.held == 0)
        assert prefill.memory.slots.held == prefill.memory.pages.held == 0


@pytest.mark.parametrize("room", ["prefill", "decode"])
async def test_a_fault_of_one_message_leaves_the_room_at_work(room):
    async with rooms() as relay:
        served = getattr(relay, f"{room}s")[0]
        before = served.room._handlers.copy()
        served.room._handlers = dict.fromkeys(before, fault)
        with pytest.raises(Exception, match="fault"):
            await ids(relay)
        served.room._handlers = before
        assert len((await ids(relay))[0]) == ASK["max_tokens"]
