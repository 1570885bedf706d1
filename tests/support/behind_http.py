"""Real rooms over real NIXL behind a router that listens for HTTP, all in this process.

A test may reach into the rooms, while its client knows nothing but an address. Rooms that are to be
stopped or killed can be processes beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.config.settings import Settings
from router.app import Router
from router.readiness import Readiness
from router.seats import Seat, Seats
from services.decode.room import DecodeRoom
from services.encoder.room import EncoderRoom
from services.prefill.room import PrefillRoom
from tests.support.cases import Answer, Case, Runner
from tests.support.processes import SECRET, Process
from tests.support.relay import Relay

READY_S = 60.0


@dataclass
class Site(Relay):
    """A relay with a door; as `Runner` wants a server."""

    url: str = ""
    admin_url: str = ""
    model: str = ""
    client: httpx.AsyncClient = field(default_factory=httpx.AsyncClient)
    runner: Runner = None  # type: ignore[assignment]
    readiness: Readiness = None  # type: ignore[assignment]

    async def ask(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> Answer:
        """Send a request from this loop, so that it can be cancelled."""
        reply = await self.client.post(path, json={"model": self.model} | body, timeout=timeout_s)
        return Answer(reply.status_code, reply.headers, reply.text, body)

    def body(self, name: str, **changes: Any) -> dict[str, Any]:
        """The body of a case, filled in."""
        case: Case = self.runner.cases[name]
        return self.runner.fill_value(case.request["body"], case) | changes

    async def empty(self, within_s: float = 10.0) -> None:
        """Until no room holds anything for a request."""
        await asyncio.to_thread(self.runner.until_empty, within_s)


@contextlib.asynccontextmanager
async def behind_http(
    settings: Settings,
    *,
    encoder: int = 0,
    prefill: int = 1,
    decode: int = 1,
    beside: Sequence[Process] = (),
) -> AsyncIterator[Site]:
    """So many rooms of each kind here, and processes that listen already; ready to serve."""
    encoders = [EncoderRoom(settings, secret=SECRET) for _ in range(encoder)]
    prefills = [PrefillRoom(settings, secret=SECRET) for _ in range(prefill)]
    decodes = [DecodeRoom(settings, secret=SECRET) for _ in range(decode)]
    rooms = [*encoders, *prefills, *decodes]
    seats = Seats()
    router = Router(settings, seats, secret=SECRET, name="test")
    try:
        endpoints = [await room.open("127.0.0.1") for room in rooms]
        places = [Seat(key=e.id, host=e.host, port=e.port) for e in endpoints]
        places += [
            Seat(key=p.place["id"], host=p.place["host"], port=p.place["port"]) for p in beside
        ]
        seats.fill("line", places)
        await router.start()
        async with asyncio.timeout(READY_S):
            while not router.readiness.is_ready:
                await asyncio.sleep(0.02)
        site = Site(router.house, encoders, prefills, decodes)
        site.url = f"http://127.0.0.1:{router.public.port}"
        site.admin_url = f"http://127.0.0.1:{router.admin.port}"
        site.model = settings.model.name
        site.readiness = router.readiness
        site.runner = await asyncio.to_thread(Runner, site)
        async with httpx.AsyncClient(base_url=site.url) as site.client:
            yield site
        site.runner.close()
    finally:
        await router.stop()
        for room in rooms:
            await room.close()
