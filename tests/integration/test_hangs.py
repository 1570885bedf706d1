"""A prefill replica that stops without dying, in mid-READ, with real rooms over tcp.

The decode room lives in this process, so that the test can stop the producer's process between the
claim of its ticket and the READ, and look into the memory that the READ may still write.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal

import pytest

from common.runtime import process, text_room
from services.decode.room import DecodeRoom
from tests.support.golden import NANO
from tests.support.processes import Process, write_settings
from tests.support.relay import Relay, with_producers

ANSWER = 5
DEADLINE_S = 1.0  # of one fetch


@contextlib.asynccontextmanager
async def relay_with_processes(tmp_path, *, axes: dict[str, int] | None = None, **transfer):
    tables = {
        "model": {"path": str(NANO), "dtype": "float32"},
        "transfer": {"transports": "tcp", "deadline_s": DEADLINE_S} | transfer,
        # the READ's own deadline must find it, not the heartbeat
        "router": {"silent_s": 20.0, "heartbeat_s": 0.2},
        "decode": axes or {},
    }
    path = write_settings(tmp_path / "settings.toml", tables)
    async with with_producers(path) as (relay, decode, producers):
        yield relay, decode, producers


class Stopper:
    """Stops, once, the process whose memory is about to be claimed, or to be READ."""

    def __init__(self, decode: DecodeRoom, producers: list[Process], moment: str) -> None:
        self._producers, self.stopped = producers, None
        at = {"claim": decode.room.peers, "read": decode.link}[moment]
        self._go_on = getattr(at, moment)
        setattr(at, moment, self)

    def __call__(self, peer, *more):
        if self.stopped is None:
            self.stopped = next(p for p in self._producers if p.place["id"] == peer.id)
            self.stopped.signal(signal.SIGSTOP)
        return self._go_on(peer, *more)

    def resume(self) -> None:
        if self.stopped is not None:
            self.stopped.signal(signal.SIGCONT)


def question(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 1200) for _ in range(200)]


async def answer(relay: Relay, seed: int) -> list[int]:
    return (await relay.run(relay.task(question(seed), max_tokens=ANSWER))).ids()


async def until(claim, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not claim():
            await asyncio.sleep(0.02)


async def test_a_stopped_producer_costs_one_pass_and_its_late_bytes_reach_nobody(tmp_path):
    async with relay_with_processes(tmp_path) as (relay, decode, producers):
        expected = [await answer(relay, seed) for seed in range(4)]
        stopper = Stopper(decode, producers, "read")
        try:
            assert await answer(relay, 0) == expected[0]  # on the other producer
            assert decode.receiver.quarantined == 1
            held = decode.memory.pages.held, decode.memory.slots.held
            assert min(held) > 0  # of no request, and nobody may take them
            others = [asyncio.create_task(answer(relay, seed)) for seed in range(1, 4)]
            await asyncio.sleep(0.05)
            stopper.resume()
            assert [await other for other in others] == expected[1:]
            await until(lambda: decode.receiver.quarantined == 0, 5.0)
            await until(lambda: not decode.memory.pages.held and not decode.memory.slots.held, 5.0)
        finally:
            stopper.resume()
        await relay.nothing_left()


async def test_a_producer_that_stops_before_its_ticket_is_claimed_is_passed_over(tmp_path):
    async with relay_with_processes(tmp_path) as (relay, decode, producers):
        expected = await answer(relay, 0)
        stopper = Stopper(decode, producers, "claim")
        try:
            assert await answer(relay, 0) == expected
            assert stopper.stopped is not None and decode.receiver.quarantined == 0
        finally:
            stopper.resume()
        await relay.nothing_left()


class Withheld:
    """Stops, once, the process that another rank is about to READ."""

    def __init__(self, decode: DecodeRoom, producers: list[Process]) -> None:
        self._producers, self.stopped = producers, None
        self._go_on = decode.leading.pull
        decode.leading.pull = self

    def __call__(self, place, reads, *more):
        for sources in reads.values() if self.stopped is None else ():
            peer = sources[0][0]
            self.stopped = next(p for p in self._producers if p.place["id"] == peer.id)
            self.stopped.signal(signal.SIGSTOP)
        return self._go_on(place, reads, *more)

    def resume(self) -> None:
        if self.stopped is not None:
            self.stopped.signal(signal.SIGCONT)


@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_room_whose_quarantine_stays_full_is_not_ready_finishes_its_streams_and_exits(
    tmp_path, monkeypatch, lanes
):
    """With two lanes it is the other rank's quarantine, and the leader's own is empty."""
    monkeypatch.setattr(text_room, "SPENT_S", 0.5)
    more = {"axes": {"data": lanes}, "quarantine_bound": 1}
    async with relay_with_processes(tmp_path, **more) as (relay, decode, producers):
        whole = (await relay.run(relay.task(question(1), max_tokens=250))).ids()

        async def opened(host: str):
            return decode.room.endpoint

        decode.open = opened
        serving = asyncio.create_task(process.serve(decode, "127.0.0.1", drain_s=30.0))
        long = asyncio.create_task(relay.run(relay.task(question(1), max_tokens=250)))
        await until(
            lambda: decode.engine.helds() and decode.engine.helds()[0].stage == "running", 15
        )
        stopper = Stopper(decode, producers, "read") if lanes == 1 else Withheld(decode, producers)
        try:
            in_vain = asyncio.create_task(answer(relay, 2))  # no other decode replica takes it
            await until(lambda: decode.must_restart, 10.0)
            assert decode.receiver.must_restart is (lanes == 1) and decode.quarantined == 1
            await until(lambda: relay.house.pairs_ready() == 0, 5.0)
            in_vain.cancel()
            assert (await long).ids() == whole
            assert await asyncio.wait_for(serving, 20) == 1
        finally:
            stopper.resume()
