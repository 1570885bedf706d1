"""Rooms that die under a request, as processes over real NIXL: the answer goes on, or says why not.

On the reference path a continued answer is the one an undisturbed run gives, token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from common.config.loading import load_settings
from common.errors import RoomLost
from router.journey import Journey
from router.seats import Seat
from tests.support.processes import rooms, write_settings
from tests.support.relay import Relay, house_of

pytestmark = pytest.mark.slow

PROMPT = tuple(range(20, 120))
ASK = {"max_tokens": 40, "temperature": 1.0, "seed": 11, "n": 2}


@contextlib.asynccontextmanager
async def relay(folder, **counts: int):
    path = write_settings(
        folder / "settings.toml",
        {"server": {"port": 0, "admin_port": 0}, "router": {"heartbeat_s": 0.2, "silent_s": 2.0}},
    )
    with rooms(path, **counts) as running:
        seats = [Seat(key=p.place["id"], host="127.0.0.1", port=p.place["port"]) for p in running]
        async with house_of(load_settings(path, {}), seats) as house:
            yield Relay(house), running


def end_busy_decode(house, running, number: signal.Signals) -> None:
    """Signal the decode process that sends the request's frames."""
    (busy,) = [replica for replica in house.board.present("decode") if replica.followers]
    (process,) = [p for p in running if p.place["id"] == busy.id]
    process.signal(number)


async def disturbed(relay: Relay, running, number: signal.Signals, at: tuple[int, ...]):
    """Ids of both choices of a run whose decode process is ended at these lengths."""
    marks, got = list(at), [[], []]
    async with Journey(relay.task(PROMPT, **ASK), relay.house) as journey:
        async for item in journey.events():
            got[item.choice] += [token.id for token in item.tokens]
            if marks and len(journey.answer.log[0]) >= marks[0] and not journey.answer.is_complete:
                marks.pop(0)
                end_busy_decode(relay.house, running, number)
    return got


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_an_answer_whose_decode_is_lost_continues_token_for_token(tmp_path, number):
    async with relay(tmp_path, prefill=1, decode=2) as (line, running):
        whole = await line.run(line.task(PROMPT, **ASK))
        got = await asyncio.wait_for(disturbed(line, running, number, (10,)), 60)
        assert got == [whole.ids(0), whole.ids(1)]
        assert len(line.house.seen("decode")[0]) == 1
        assert line.house.tally.snapshot()['baton_replays_total{died="decode"}'] == 1
        await line.nothing_left()


async def test_a_request_under_which_two_decodes_died_ends_with_an_error(tmp_path):
    async with relay(tmp_path, prefill=1, decode=3) as (line, running):
        with pytest.raises(RoomLost, match="two decode replicas"):
            await disturbed(line, running, signal.SIGKILL, (10, 20))
        await line.nothing_left()


async def test_a_prompt_whose_prefill_is_killed_is_computed_elsewhere(tmp_path):
    prompt = tuple(i % 900 + 20 for i in range(3000))
    async with relay(tmp_path, prefill=2, decode=1) as (line, running):
        whole = await line.run(line.task(prompt, max_tokens=4))
        running_now = asyncio.create_task(line.run(line.task(prompt, max_tokens=4)))
        async with asyncio.timeout(20):
            while not (
                busy := [r for r in line.house.board.present("prefill") if r.assigned_tokens]
            ):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        (process,) = [p for p in running if p.place["id"] == busy[0].id]
        process.signal(signal.SIGKILL)
        assert (await asyncio.wait_for(running_now, 60)).ids() == whole.ids()
        await line.nothing_left()
