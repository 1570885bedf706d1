"""An encoder that stops in mid-READ, over tcp: the embeddings come from another one, and the rows
that the late READ may still write belong to nobody until it ended."""

from __future__ import annotations

import asyncio

from common.config.loading import load_settings
from router.seats import Seat
from services.decode.room import DecodeRoom
from services.prefill.room import PrefillRoom
from tests.integration.test_hangs import Stopper
from tests.support.processes import SECRET, Process, rooms, write_settings
from tests.support.prompts import image, question
from tests.support.relay import Relay, house_of

TABLES = {
    "transfer": {"transports": "tcp", "deadline_s": 1.0},
    "router": {"silent_s": 20.0},  # the READ's own deadline must find it, not the heartbeat
}
ASK = {"max_tokens": 6, "images": [image()], "offsets": [40]}


async def test_rows_of_a_read_that_hangs_go_to_nobody_until_it_ended(tmp_path):
    path = write_settings(tmp_path / "settings.toml", TABLES)
    settings = load_settings(path, {})
    with rooms(path, encoder=2, prefill=0, decode=0) as encoders:
        prefill, decode = (kind(settings, secret=SECRET) for kind in (PrefillRoom, DecodeRoom))
        here = [await room.open("127.0.0.1") for room in (prefill, decode)]
        places = [(p.place["id"], p.place["host"], p.place["port"]) for p in encoders]
        places += [(e.id, e.host, e.port) for e in here]
        seats = [Seat(key=key, host=host, port=port) for key, host, port in places]
        try:
            async with house_of(settings, seats) as house:
                relay = Relay(house, prefills=[prefill], decodes=[decode])
                await check(relay, prefill, encoders)
        finally:
            await prefill.close()
            await decode.close()


async def check(relay: Relay, prefill: PrefillRoom, encoders: list[Process]) -> None:
    whole = await answer(relay)
    stopper = Stopper(prefill, encoders, "read")
    try:
        assert await answer(relay) == whole
        assert stopper.stopped is not None and prefill.receiver.quarantined == 1
        assert prefill.arena.held == 2  # rows of no request
        assert prefill.memory.slots.held == prefill.memory.pages.held == 0
        start = next(iter(prefill.arena._taken))
        others = [asyncio.create_task(answer(relay)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert start in prefill.arena._taken
        stopper.resume()
        assert [await other for other in others] == [whole] * 3
        async with asyncio.timeout(5):
            while prefill.arena.held or prefill.receiver.quarantined:
                await asyncio.sleep(0.02)
    finally:
        stopper.resume()
    await relay.nothing_left()


async def answer(relay: Relay) -> list[int]:
    return (await relay.run(relay.task(question(1), **ASK))).ids()
