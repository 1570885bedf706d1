"""A router as a process: two listeners, wires to the rooms, probes; start, drain, stop.

`python -m router.app SETTINGS --rooms host:port,host:port --secret S` runs it without Ray and
prints one line of JSON with its ports. Under Serve, `RouterReplica` is the deployment's class.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.checkpoint import load_spec
from common.config.loading import load_settings, parse_settings
from common.config.settings import Settings
from common.errors import NotReady, RoomLost, ServingError
from common.observe.logs import note, start_logging
from router import decisions
from router import seats as seating
from router.admin import admin_app
from router.desk import Desk
from router.house import House
from router.listener import HttpListener
from router.readiness import Readiness
from router.routes import public_app
from router.seats import Seats, seats_of
from router.switchboard import SeatTable

FAREWELL_S = 2.0  # after the drain time, for error events on their way to their readers
DISCOVER_S = 1.0  # between two attempts to make Serve tell of the rooms
SETTLE_S = 60.0  # a new replica listens when it is ready, at the latest after so long
WATCH_S = 0.2  # between two looks at what is decided for all routers

_log = logging.getLogger("baton.router")


class Router:
    """One router process."""

    def __init__(self, settings: Settings, seats: SeatTable, *, secret: str, name: str) -> None:
        """`secret` is what the rooms demand in `Hello`; nothing runs yet."""
        self.settings = settings
        spec = load_spec(Path(settings.model.path))
        self.house = House(settings, seats, secret=secret, name=name)
        self.desk = Desk(settings, spec)
        self.readiness = Readiness(self.house, context=self.desk.limits.context)
        server = settings.server
        self.public = HttpListener(
            public_app(self.desk, self.house, self.readiness),
            host=server.host,
            port=server.port,
            drain_s=server.drain_s + FAREWELL_S,
            bounds=server,
        )
        self.admin = HttpListener(
            admin_app(self.house, self.readiness),
            host=server.admin_host,
            port=server.admin_port,
            drain_s=1.0,
            bounds=server,
        )
        self._prober: asyncio.Task[None] | None = None

    async def start(self, settle_s: float = 0.0) -> None:
        """Dial the rooms, begin to probe, listen; clients may come once it is ready.

        They may come after `settle_s` in any case, and are told then that nothing is ready.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self.house.start()
        self._prober = asyncio.get_running_loop().create_task(self.readiness.run())
        await self.admin.start()
        if settle_s:
            await self.readiness.wait(settle_s)
        await self.public.start()

    def turn_away(self) -> None:
        """The whole service stops: refuse who comes from now on; what runs goes on."""
        self.readiness.is_draining = self.readiness.is_closing = True

    async def stop(self) -> None:
        """Drain: not ready from now on, running requests may end, then everything is let go.

        Requests that take longer than `server.drain_s` end with an error that their readers see.
        """
        self.readiness.is_draining = True
        late = asyncio.create_task(self._cut_late())
        await self.public.stop()
        late.cancel()
        await self.admin.stop()
        if self._prober is not None:
            self._prober.cancel()
        await self.house.stop()
        await self.desk.grammars.close()

    async def _cut_late(self) -> None:
        await asyncio.sleep(self.settings.server.drain_s)
        self.house.cut(NotReady("this router is leaving; send the request again"))

    @property
    def is_alive(self) -> bool:
        """Whether both listeners serve and the probes run."""
        probing = self._prober is not None and not self._prober.done()
        return self.public.is_alive and self.admin.is_alive and probing


class RouterReplica:
    """The router as a Serve deployment; `services/app.py` wraps it.

    `rooms` are handles of the other deployments, bound with `router.discovery.PinRouter`: a first
    call on each makes Serve fill this process's table of seats.
    """

    def __init__(self, tables: Mapping[str, Any], secret: str, rooms: Mapping[str, Any]) -> None:
        """`tables`: settings as plain dictionaries; `rooms`: handles by name."""
        start_logging("router")
        settings = parse_settings(tables, source="deployment")
        name = f"router-{secrets.token_hex(4)}"
        self._router = Router(settings, seating.TABLE, secret=secret, name=name)
        self._rooms = dict(rooms)
        self._started: asyncio.Task[None] | None = None
        self._discovery: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Called once by Serve on the loop that serves; here the listeners open.

        Serve counts this replica as running when it returns, and lets an old one go only then; and
        replicas of one host share a port, so one that cannot answer yet must not listen.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._router.start(SETTLE_S))
            self._discovery = asyncio.create_task(self._discover())
            self._watch = asyncio.create_task(self._watch_scaling())
        await self._started
        server = self._router.settings.server
        return {
            "host": server.host,
            "port": self._router.public.port,
            "admin_port": self._router.admin.port,
        }

    async def ping(self) -> str:
        """A call that does nothing."""
        return "pong"

    async def check_health(self) -> None:
        """Asked by Serve every few seconds.

        Raises:
            RoomLost: a listener or the probes ended.
        """
        if self._started is not None and self._started.done() and not self._router.is_alive:
            raise RoomLost("a listener or the probes of this router ended")

    async def __del__(self) -> None:
        """Awaited by Serve before the process ends."""
        for task in (self._discovery, self._watch):
            if task is not None:
                task.cancel()
        await self._router.stop()

    async def _discover(self) -> None:
        waiting = list(self._rooms.values())
        while waiting:
            for handle in list(waiting):
                try:
                    await handle.broadcast("ping").results_async(timeout_s=5.0)
                    waiting.remove(handle)
                except Exception:
                    # Serve raises many kinds while a deployment starts; the table of seats shows
                    # when it is there, and until then there is nothing to do but to ask again.
                    await asyncio.sleep(DISCOVER_S)

    async def _watch_scaling(self) -> None:
        """Show what the policy decides, wake a room that sleeps (a call by handle waits), and
        refuse who comes when the whole service ends, which Serve says two seconds later.
        """
        house, calls = self._router.house, set[asyncio.Task[None]]()
        while True:
            decided, closing = await asyncio.to_thread(decisions.read)
            house.decisions.take(decided, house.tally)
            if closing:
                self._router.turn_away()
            for room in house.missing & self._rooms.keys() - {call.get_name() for call in calls}:
                call = asyncio.create_task(self._call(room), name=room)
                calls.add(call)
                call.add_done_callback(calls.discard)
            house.missing.clear()
            await asyncio.sleep(WATCH_S)

    async def _call(self, room: str) -> None:
        try:
            await self._rooms[room].ping.remote()
        except Exception as error:  # as many kinds as in `_discover`; the next request calls again
            note(_log, logging.INFO, "a room was called in vain", room=room, reason=str(error))


async def serve(settings: Settings, seats: Seats, secret: str) -> None:
    """Run until SIGTERM or SIGINT."""
    router = Router(settings, seats, secret=secret, name=f"router-{secrets.token_hex(4)}")
    await router.start()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    line = {"port": router.public.port, "admin_port": router.admin.port, "name": router.house.name}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    await over.wait()
    await router.stop()


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="A router in front of rooms that already listen.")
    parser.add_argument("settings", type=Path)
    parser.add_argument("--rooms", required=True, help="host:port,host:port")
    parser.add_argument("--secret", required=True)
    given = parser.parse_args()
    start_logging("router")
    seats = Seats()
    try:
        seats.fill("command line", seats_of(given.rooms))
        asyncio.run(serve(load_settings(given.settings), seats, given.secret))
    except (ServingError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
