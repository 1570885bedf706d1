"""RoomReplica: a room as a Serve replica sees it, without Ray.

Serve calls these methods on the event loop: metadata once when the replica becomes ready, health
every few seconds, `__del__` when it leaves. Leaving, a room finishes what it holds first
(`drain.py`): new work stops, since the replica left every router's table.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.contract.messages import Endpoint, Ping
from common.errors import ServingError
from common.runtime.drain import Served, drain
from common.runtime.meter import Meter


class RoomReplica:
    """A replica of one room."""

    def __init__(
        self, build: Callable[[], Served], host: str, drain_s: float, window_s: float = 10.0
    ) -> None:
        """`build()` loads the model; `drain_s` bounds how long leaving may take.

        Figures for scaling are means over `window_s`.
        """
        self._room = build()
        self._host, self._drain_s = host, drain_s
        self._endpoint: Endpoint | None = None
        self._window_s = window_s
        self._meter: Meter | None = None

    async def record_replica_metadata(self) -> dict[str, object]:
        """Where the room listens; Serve hands it to every router."""
        if self._endpoint is None:
            self._endpoint = await self._room.open(self._host)
            self._meter = Meter(self._endpoint.room, self._window_s)
        place = self._endpoint
        return {
            "room": place.room,
            "id": place.id,
            "epoch": place.epoch,
            "host": place.host,
            "port": place.port,
        }

    async def ping(self) -> str:
        """Fill the caller's table of replicas."""
        return "pong"

    async def check_health(self) -> None:
        """Raise when the engine stopped or too many READs are stuck: Serve replaces the replica."""
        load = await self._room.load(Ping(), "serve")
        if load.suspended:
            raise ServingError("the engine stopped, or its quarantine is full")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve every second when it scales this room; see `Meter`."""
        if self._meter is None:
            return {}
        return self._meter.take(time.monotonic(), await self._room.load(Ping(), "serve"))

    async def __del__(self) -> None:  # Serve awaits it
        await drain(self._room, self._drain_s)
        await self._room.close()
