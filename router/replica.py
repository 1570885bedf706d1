"""One connected replica: its wire, its last words, and the requests that follow its frames.

Knows the small messages every room understands. It refuses to know what jobs mean, and in which
order rooms are visited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from common.contract.messages import (
    AnyMessage,
    Cancel,
    Endpoint,
    Load,
    Message,
    Offer,
    Offered,
    Pace,
    Ping,
    TokenFrame,
    TokenItem,
)
from common.errors import RoomLost, ServingError
from common.wire import Wire
from router.placement import Candidate

CALL_S = 10.0  # for small messages, which a room answers at once


class Follower(Protocol):
    """A request that waits for frames."""

    def take(self, item: TokenItem) -> None:
        """Its share of a frame."""

    def lost(self, error: RoomLost) -> None:
        """The replica died or stopped answering; no more frames come."""


class Replica:
    """One epoch of one replica, as seen through one connection."""

    def __init__(self, wire: Wire, endpoint: Endpoint) -> None:
        """Just dialled: no load is known yet."""
        self.wire, self.endpoint = wire, endpoint
        self.room, self.id, self.epoch = endpoint.room, endpoint.id, endpoint.epoch
        self.load = Load(epoch=endpoint.epoch)
        self.heard_at = monotonic()
        self.is_leaving = False
        self.leases = 0  # tickets and reservations of requests between two of their jobs
        self.assigned_tokens = 0
        self.granted_since_load = 0
        self.jobs = 0
        self.followers: dict[str, Follower] = {}
        self.offers: dict[str, Callable[[Offer], None]] = {}  # by request: who hears of its offer

    def candidate(self) -> Candidate:
        """What placement sees."""
        return Candidate(
            id=self.id,
            epoch=self.epoch,
            queued_tokens=self.load.queued_tokens,
            assigned_tokens=self.assigned_tokens,
            free_slots=self.load.free_slots - self.granted_since_load,
            free_pages=self.load.free_pages,
            suspended=self.load.suspended,
        )

    async def call(self, message: Message, *, timeout_s: float = CALL_S) -> AnyMessage:
        """Send a message and wait for its reply.

        Raises:
            RoomLost: the connection broke, or no reply came.
            ServingError: what the room answered with.
        """
        self.jobs += 1
        try:
            return await self.wire.call(message, timeout_s=timeout_s)
        except RoomLost as error:
            raise RoomLost(f"{self.room} {self.id}: {error}") from error
        finally:
            self.jobs -= 1

    @contextlib.contextmanager
    def carrying(self, tokens: int) -> Iterator[None]:
        """Count prompt tokens as this replica's work while the block runs."""
        self.assigned_tokens += tokens
        try:
            yield
        finally:
            self.assigned_tokens -= tokens

    async def cancel(self, request: str) -> None:
        """Make the room forget a request. A lost room frees by lease, so its loss is not told."""
        with contextlib.suppress(ServingError):
            await self.call(Cancel(request=request))

    async def pace(self, request: str, paused: bool) -> None:
        """Make decode pause a request, or go on with it."""
        with contextlib.suppress(ServingError):
            await self.call(Pace(request=request, paused=paused))

    async def ping(self, timeout_s: float) -> None:
        """One heartbeat.

        Raises:
            RoomLost: no answer, or another epoch answered.
        """
        load = await self.wire.call(Ping(), timeout_s=timeout_s)
        if not isinstance(load, Load) or load.epoch != self.epoch:
            raise RoomLost(f"{self.room} {self.id} answered the heartbeat of another epoch")
        self._learn(load)

    def _learn(self, load: Load) -> None:
        self.load, self.granted_since_load = load, 0
        self.heard_at = monotonic()
        self.is_leaving |= load.leaving

    def hear(self, message: AnyMessage) -> None:
        """Deal a frame out to the requests it carries; note a load sent unasked, and offers."""
        if isinstance(message, Load) and message.epoch == self.epoch:
            self._learn(message)
        elif isinstance(message, Offered) and message.request in self.offers:
            self.offers[message.request](message.offer)
        elif isinstance(message, TokenFrame):
            for item in message.items:
                follower = self.followers.get(item.request)
                if follower is not None:
                    follower.take(item)

    async def until_lost(self) -> None:
        """Wait for the end of the connection, then tell every follower."""
        await self.wire.closed.wait()
        for follower in list(self.followers.values()):
            follower.lost(RoomLost(f"{self.room} {self.id} died or stopped answering"))
        self.followers.clear()

    @property
    def is_idle(self) -> bool:
        """Whether no call, no stream and no lease of ours is there."""
        return not (self.jobs or self.followers or self.leases)
