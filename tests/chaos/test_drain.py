"""Leaving: a room that is told to goes when its streams have ended, and nothing is lost by it."""

from __future__ import annotations

import asyncio

import pytest

from router.journey import Journey
from tests.support.fleet import Fleet, exit_code, fleet
from tests.support.processes import write_settings
from tests.support.prompts import image, question

PORTS = {"port": 0, "admin_port": 0}
ROUTER = {"heartbeat_s": 0.2, "silent_s": 3.0}
LONG = {"max_tokens": 150, "temperature": 1.0, "seed": 3}


def settings(folder, **tables):
    return write_settings(folder / "settings.toml", {"server": PORTS, "router": ROUTER} | tables)


async def test_a_decode_process_told_to_leave_takes_nothing_new_finishes_its_stream_and_exits(
    tmp_path,
):
    async with fleet(settings(tmp_path), decode=2) as running:
        whole = await running.run(running.task(question(1), **LONG))
        got = []
        async with Journey(running.task(question(1), **LONG), running.house) as journey:
            async for item in journey.events():
                got += [token.id for token in item.tokens]
                if len(got) == 5:  # no seat is taken away: it says itself that it leaves
                    leaving = running.busy("decode")
                    running.leave(leaving, seat_goes=False)
                    await told(running, leaving)
                    short = await running.run(running.task(question(2), max_tokens=3))
                    assert len(short.ids()) == 3 and exit_code(leaving, 0) is None
        assert got == whole.ids()
        assert await asyncio.to_thread(exit_code, leaving, 5) == 0
        assert "baton_replays_total" not in str(running.house.tally.snapshot())
        await running.nothing_left()


async def told(running: Fleet, process) -> None:
    """Until the router has heard that the process leaves."""
    async with asyncio.timeout(5):
        while process.place["id"] in running.house.seen(process.room)[1]:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_stream_longer_than_the_drain_time_is_continued_elsewhere(tmp_path):
    path = settings(tmp_path, server=PORTS | {"drain_s": 0.5})
    async with fleet(path, decode=2) as running:
        whole = await running.run(running.task(question(1), **LONG))
        got = []
        async with Journey(running.task(question(1), **LONG), running.house) as journey:
            async for item in journey.events():
                if not got:
                    leaving = running.busy("decode")
                    leaving.signal(19)  # SIGSTOP: until the drain time is over, in its own eyes
                    leaving.signal(15)
                    leaving.signal(18)
                    running._remove(leaving)
                got += [token.id for token in item.tokens]
        assert got == whole.ids()
        assert await asyncio.to_thread(exit_code, leaving, 5) == 0


@pytest.mark.slow
async def test_a_rolling_restart_of_every_room_under_load_loses_nothing(tmp_path):
    picture = {"images": [image()], "offsets": [40]}
    kinds = [{"max_tokens": 40}, {"max_tokens": 3}, {"max_tokens": 20, "n": 2} | picture]
    async with fleet(settings(tmp_path), encoder=1) as running:
        whole = [await answer(running, at, kind) for at, kind in enumerate(kinds)]
        over, count = asyncio.Event(), 0

        async def ask_on(at: int) -> None:
            nonlocal count
            while not over.is_set():
                assert await answer(running, at, kinds[at]) == whole[at]
                count += 1

        asking = [asyncio.create_task(ask_on(at)) for at in (0, 1, 2, 0, 1)]
        old = list(running.processes)
        for process in old:
            await running.replace(process)
        for process in old:
            assert await asyncio.to_thread(exit_code, process, 30) == 0
        over.set()
        await asyncio.wait_for(asyncio.gather(*asking), 60)
        assert count > 10
        assert "baton_replays_total" not in str(running.house.tally.snapshot())
        await running.nothing_left()


async def answer(running: Fleet, at: int, kind) -> list[list[int]]:
    reply = await running.run(running.task(question(at), **kind))
    return [reply.ids(choice) for choice in range(len(reply.tokens))]
