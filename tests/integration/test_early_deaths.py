"""A prefill process that dies or stops while decode pulls what it still computes."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from common.config.loading import load_settings
from router.seats import Seat
from services.decode.room import DecodeRoom
from tests.support.golden import NANO
from tests.support.passing import Pulled, until
from tests.support.processes import SECRET, rooms, write_settings
from tests.support.prompts import question
from tests.support.relay import Relay, house_of

GROUPS = 3


@contextlib.asynccontextmanager
async def with_producers(tmp_path, **transfer):
    tables = {
        "model": {"path": str(NANO), "dtype": "float32"},
        "transfer": {"transports": "tcp", "layer_groups": GROUPS} | transfer,
        "router": {"silent_s": 3.0, "heartbeat_s": 0.2},
    }
    path = write_settings(tmp_path / "settings.toml", tables)
    settings = load_settings(path, {})
    with rooms(path, prefill=2, decode=0) as producers:
        decode = DecodeRoom(settings, secret=SECRET)
        there = await decode.open("127.0.0.1")
        places = [process.place for process in producers]
        seats = [Seat(key=p["id"], host=p["host"], port=p["port"]) for p in places]
        seats.append(Seat(key=there.id, host=there.host, port=there.port))
        try:
            async with house_of(settings, seats) as house:
                yield Relay(house, decodes=[decode]), producers
        finally:
            await decode.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_prefill_that_is_gone_in_mid_pull_costs_one_pass(tmp_path, how):
    async with with_producers(tmp_path) as (relay, producers):
        prompt = question(1, 1000)  # its one pass takes a while
        wanted = (await relay.run(relay.task(prompt))).ids()
        pulled, began = Pulled(relay), []
        pull = relay.decodes[0].engine.pull
        relay.decodes[0].engine.pull = lambda job: began.append(job) or pull(job)
        running = asyncio.create_task(relay.run(relay.task(prompt)))
        await until(lambda: bool(began))
        gone = next(p for p in producers if p.place["id"] == began[0].producer.id)
        await until(lambda: pulled.layers() == 2)
        gone.signal(how)
        assert pulled.layers() < 6, "the pass was over before its process was gone"
        try:
            assert (await running).ids() == wanted
            assert len(began) == 2 and began[1].producer.id != began[0].producer.id
            await relay.nothing_left()
        finally:
            gone.signal(signal.SIGCONT)
        decode = relay.decodes[0]
        await until(lambda: not decode.memory.slots.held and not decode.memory.pages.held)
