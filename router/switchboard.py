"""Wires to every seat: dialled, pinged, dropped when silent, dialled again.

Knows who can be spoken to right now. It refuses to know what is said (`router/flow.py`) and which
replica is the better choice (`router/placement.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

from common.config.settings import RouterSettings
from common.contract.messages import AnyMessage
from common.errors import ConfigError, RoomLost, ServingError
from common.observe.logs import note
from common.wire import dial
from router.bell import Bell
from router.replica import Replica
from router.seats import Seat

TICK_S = 0.1  # how soon a new or vanished seat is noticed
REDIAL_S = 0.5  # between two attempts to reach a seat

_log = logging.getLogger("baton.switchboard")


class SeatTable(Protocol):
    """Where the seats come from."""

    def all(self) -> Mapping[str, Seat]:
        """Every seat by key."""


class Switchboard:
    """The connected replicas of all rooms."""

    def __init__(
        self, seats: SeatTable, settings: RouterSettings, *, secret: str, caller: str, bell: Bell
    ) -> None:
        """`caller` is this router's name in `Hello`; `bell` rings at every load that arrives."""
        self._seats, self._settings = seats, settings
        self._secret, self._caller, self._bell = secret, caller, bell
        self._lines: dict[str, asyncio.Task[None]] = {}
        self._replicas: dict[str, Replica] = {}  # by seat
        self._known: dict[str, str] = {}  # seat -> id of who sat there last
        self._tender: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the table."""
        self._tender = asyncio.get_running_loop().create_task(self._tend())

    async def stop(self) -> None:
        """Hang up everywhere."""
        tasks = [*self._lines.values(), *([self._tender] if self._tender else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def present(self, room: str) -> list[Replica]:
        """Replicas of a room that a new request may be sent to."""
        return [
            r
            for r in self._replicas.values()
            if r.room == room and not (r.is_leaving or r.wire.closed.is_set())
        ]

    def connected(self) -> list[Replica]:
        """All replicas with a wire, the leaving ones included."""
        return sorted(self._replicas.values(), key=lambda r: (r.room, r.id))

    def silent(self) -> list[str]:
        """Ids of replicas that have a seat and do not answer; a seat's key if it never did."""
        return sorted(
            self._known.get(key, key) for key in self._seats.all() if key not in self._replicas
        )

    async def _tend(self) -> None:
        while True:
            seats = self._seats.all()
            for key, seat in seats.items():
                if key not in self._lines:
                    self._lines[key] = asyncio.create_task(self._hold(seat))
            for key in list(self._lines):
                if key not in seats:
                    self._let_go(key)
            await asyncio.sleep(TICK_S)

    def _let_go(self, key: str) -> None:
        replica = self._replicas.get(key)
        if replica is not None:
            # Its seat went before the replica did: it drains. What runs there may end there.
            replica.is_leaving = True
            if not replica.is_idle:
                return
        self._lines.pop(key).cancel()
        self._known.pop(key, None)

    async def _hold(self, seat: Seat) -> None:
        while True:
            try:
                await self._connect(seat)
            except RoomLost as error:
                note(_log, logging.DEBUG, "seat unreachable", seat=seat.key, reason=str(error))
            except ServingError as error:
                level = logging.ERROR if isinstance(error, ConfigError) else logging.WARNING
                note(_log, level, "seat refused us", seat=seat.key, reason=str(error))
            await asyncio.sleep(REDIAL_S)

    async def _connect(self, seat: Seat) -> None:
        answering: list[Replica] = []

        def hear(message: AnyMessage) -> None:
            for replica in answering:
                replica.hear(message)

        wire, endpoint = await dial(
            seat.host, seat.port, secret=self._secret, caller=self._caller, listener=hear
        )
        replica = Replica(wire, endpoint)
        answering.append(replica)
        watch = asyncio.create_task(replica.until_lost())
        try:
            await replica.ping(self._settings.silent_s)
            self._replicas[seat.key] = replica
            self._known[seat.key] = replica.id
            note(_log, logging.INFO, "replica present", seat=replica.id, epoch=replica.epoch)
            await self._beat(replica)
        finally:
            self._replicas.pop(seat.key, None)
            wire.close()
            await asyncio.wait({watch})  # it ends with the wire
            self._bell.ring()

    async def _beat(self, replica: Replica) -> None:
        while not replica.wire.closed.is_set():
            self._bell.ring()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_s):
                    await replica.wire.closed.wait()
                break
            await replica.ping(self._settings.silent_s)


def age_s(replica: Replica) -> float:
    """Seconds since the replica was last heard."""
    return monotonic() - replica.heard_at
