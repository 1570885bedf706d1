"""A prefill process that dies or stops while decode pulls what it still computes."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from tests.support.golden import NANO
from tests.support.passing import Pulled, until
from tests.support.processes import write_settings
from tests.support.prompts import question
from tests.support.relay import with_producers

GROUPS = 3


@contextlib.asynccontextmanager
async def pulling(tmp_path, **transfer):
    tables = {
        "model": {"path": str(NANO), "dtype": "float32"},
        "transfer": {"transports": "tcp", "layer_groups": GROUPS} | transfer,
        "router": {"silent_s": 3.0, "heartbeat_s": 0.2},
    }
    path = write_settings(tmp_path / "settings.toml", tables)
    async with with_producers(path) as (relay, _, producers):
        yield relay, producers


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_prefill_that_is_gone_in_mid_pull_costs_one_pass(tmp_path, how):
    async with pulling(tmp_path) as (relay, producers):
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
