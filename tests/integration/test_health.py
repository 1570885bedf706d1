"""Health while gigabytes are in flight: a room answers its routers, and the router its clients.

A room's health is what it says to a `Ping`, which Serve and every router ask it for. The router
listens for HTTP in the same process here, so that one event loop has to answer for both.
"""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from common.config.loading import load_settings
from common.contract.messages import Load, Ping
from common.contract.regions import Span
from router.app import Router
from router.seats import Seat, Seats
from services.decode.room import DecodeRoom
from tests.support.golden import NANO
from tests.support.processes import SECRET, write_settings
from tests.support.producer import OtherProcess, pool_of_words

WORDS = 1 << 21  # 8 MiB, read over and over
MOST_S = 0.5  # five times what is promised
ROUNDS = 3  # this machine may be busy with something else: one of them must show it


@pytest.mark.parametrize(("transports", "times"), [("", 512), ("tcp", 64)], ids=["host", "tcp"])
async def test_health_answers_in_time_while_half_a_gigabyte_or_more_is_read(
    tmp_path, transports, times
):
    tables = {
        "model": {"path": str(NANO)},
        "server": {"port": 0, "admin_port": 0},
        "transfer": {"transports": transports},
    }
    settings = load_settings(write_settings(tmp_path / "settings.toml", tables), {})
    producer = OtherProcess("p0", transports=transports, words=WORDS)
    decode, seats = DecodeRoom(settings, secret=SECRET), Seats()
    pool_of_words(decode.link, WORDS, "landing")
    there = await decode.open("127.0.0.1")
    seats.fill("line", [Seat(key=there.id, host=there.host, port=there.port)])
    router = Router(settings, seats, secret=SECRET, name="r1")
    await router.start()
    try:
        async with asyncio.timeout(30):
            while not router.house.board.connected():
                await asyncio.sleep(0.02)
        await asyncio.to_thread(producer.fill, 1)
        longest: list[float] = []
        while len(longest) < ROUNDS and min(longest, default=MOST_S) >= MOST_S:
            longest.append(await slowest_answer(decode, router, producer, times))
        assert min(longest) < MOST_S, f"health took {longest} s in {ROUNDS} transfers"
    finally:
        await router.stop()
        await decode.close()
        producer.close()


async def slowest_answer(decode, router, producer, times: int) -> float:
    """The longest wait for an answer, in seconds, while `times` 8 MiB are READ."""
    here, there = (Span(pool=pool, offset=0, size=4 * WORDS) for pool in ("landing", "state"))
    (room,) = router.house.board.connected()
    longest, asked = 0.0, 0
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.public.port}") as http:
        await http.get("/health")  # connected
        fetch = decode.threads.submit(
            decode.receiver.fetch,
            producer.endpoint,
            [(here, there)] * times,
            60.0,
            lambda: False,
            lambda: None,
        )
        while not fetch.done():
            began = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            assert isinstance(await room.call(Ping()), Load)
            longest, asked = max(longest, time.monotonic() - began), asked + 1
        fetch.result()
    assert asked > 0
    return longest
