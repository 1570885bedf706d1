"""Leaving: a room takes no new work, tells its routers so, and ends when it holds nothing more.

The same for a plain process at SIGTERM and for a replica that Serve scales away. Streams finish,
tickets are read or expire; `within_s` bounds all of it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from common.contract.messages import Endpoint, Holdings, Inventory, Load, Ping
from common.runtime.room import Room

POLL_S = 0.1
QUIET_S = 0.3  # nothing held for this long: an answer on its way back to us has come in

ASKER = "drain"  # our name where a caller's is asked for


class Served(Protocol):
    """What every room offers its process."""

    room: Room

    async def open(self, host: str) -> Endpoint:
        """Listen on a free port of `host`."""

    async def close(self) -> None:
        """Stop."""

    async def load(self, message: Ping, caller: str) -> Load:
        """How busy it is."""

    async def holdings(self, message: Inventory, caller: str) -> Holdings:
        """What it holds."""


async def drain(served: Served, within_s: float) -> bool:
    """Leave: returns whether everything ended in time. Closing is the caller's."""
    room = served.room
    room.is_leaving = True
    room.tell_all(await served.load(Ping(), ASKER))
    until, quiet_since = time.monotonic() + within_s, time.monotonic()
    while (now := time.monotonic()) < until and not room.ended.is_set():
        if await _is_busy(served):
            quiet_since = now
        elif now - quiet_since >= QUIET_S:
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _is_busy(served: Served) -> bool:
    load = await served.load(Ping(), ASKER)
    held = await served.holdings(Inventory(), ASKER)
    return bool(load.queued or load.running or held.slots or held.tickets or held.embeddings)
