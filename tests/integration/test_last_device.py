"""Rooms on another device than the first answer alike: each of their threads launches there."""

from __future__ import annotations

import pytest

from common.config.settings import Settings
from tests.support.golden import NANO
from tests.support.relay import changed, in_process

PROMPT = tuple(range(2, 152))


async def answered(device: str) -> list[int]:
    settings = changed(Settings(), model={"path": str(NANO), "device": device})
    settings = changed(settings, model={"dtype": "bfloat16"}, transfer={"canary_bound": 1.0})
    async with in_process(settings) as relay:
        reply = await relay.run(relay.task(PROMPT, max_tokens=12, canary=True))
    assert reply.finish == ["length"]
    return reply.ids()


@pytest.mark.multigpu
async def test_a_second_device_answers_as_the_first() -> None:
    assert await answered("cuda:1") == await answered("cuda:0")
