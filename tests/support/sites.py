"""A router in front of fake rooms, on a loop of its own, for clients that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.config import settings as cs
from router.app import Router
from router.seats import Seats, seats_of
from tests.support.nano import ROOT
from tests.support.rooms import SECRET, World, until

SETTINGS = cs.Settings(
    model=cs.ModelSettings(path=str(ROOT / "checkpoints/nano")),
    server=cs.ServerSettings(port=0, admin_port=0, drain_s=1.0),
    router=cs.RouterSettings(heartbeat_s=0.1, silent_s=0.5, queue_wait_s=2.0, probe_s=0.5),
    testing=cs.TestingSettings(scripted=True),
)


@dataclass(frozen=True)
class Place:
    """Where a client may ask, and whether requests have left anything behind."""

    url: str
    admin_url: str
    model: str
    world: World

    def nothing_left(self, within_s: float = 3.0) -> bool:
        """Whether the rooms hold nothing, now or soon."""
        end = time.monotonic() + within_s
        while self.world.held() and time.monotonic() < end:
            time.sleep(0.02)
        return not self.world.held()


@contextmanager
def standing(settings: cs.Settings = SETTINGS) -> Iterator[Place]:
    """A router and rooms for as long as the block runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    world = World()

    def run(work, timeout_s: float = 20.0):
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)

    async def start() -> Router:
        await world.open()
        seats = Seats()
        seats.fill("line", seats_of(world.addresses()))
        router = Router(settings, seats, secret=SECRET, name="r1")
        await router.start()
        await until(lambda: router.readiness.is_ready, 10.0)
        return router

    async def stop(router: Router) -> None:
        await router.stop()
        await world.close()

    router = run(start())
    try:
        urls = [f"http://127.0.0.1:{at.port}" for at in (router.public, router.admin)]
        yield Place(*urls, settings.model.name, world)
    finally:
        run(stop(router))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
