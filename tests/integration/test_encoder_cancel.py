"""A cancel that comes while a request's images are still being decoded reaches it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from common.config.settings import Settings
from common.contract.messages import Cancel, EncodeJob, Inventory
from common.errors import Cancelled
from services.encoder.room import EncoderRoom
from tests.support.processes import SECRET
from tests.support.prompts import image


async def test_a_cancel_during_decoding_leaves_nothing_behind():
    room = EncoderRoom(Settings(), secret=SECRET)
    await room.open("127.0.0.1")
    decoding, go_on, prepare = threading.Event(), threading.Event(), room._prepare

    def slow(payload, reference):
        decoding.set()
        assert go_on.wait(10)
        return prepare(payload, reference)

    room._prepare = slow
    reference, payload = image()
    job = EncodeJob(request="q", images=(reference,), payloads=(payload,), deadline_s=10)
    try:
        running = asyncio.ensure_future(room._encode(job, "router:a"))
        assert await asyncio.to_thread(decoding.wait, 10)
        await room._cancel(Cancel(request="q"), "router:a")
        go_on.set()
        with pytest.raises(Cancelled):
            await running
        held = await room.holdings(Inventory(), "router:a")
        assert (held.embeddings, held.tickets) == (0, 0)
    finally:
        go_on.set()
        await room.close()
