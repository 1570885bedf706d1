"""What the rooms may hold for one request, so that all of it can be given back.

Everything a journey asks of a room goes through `ask`, which notes the room before the message
leaves. `settle` strikes it out when the room is known to hold nothing; `free` cancels the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from common.contract.messages import AnyMessage, Message, Release
from common.errors import DeadlineExceeded, ServingError, TransferError
from router.house import House
from router.replica import Replica

SPARE_S = 0.5  # a request with less time left has reached its own deadline
GRACE_S = 2.0  # our own deadline ends a call before the call's timeout does

M = TypeVar("M", bound=Message)


class Ledger:
    """The open positions of one request."""

    def __init__(self, house: House, deadline: float) -> None:
        """Nothing is held. `deadline` is on the event loop's clock."""
        self._house, self._deadline = house, deadline
        self._touched: set[tuple[Replica, str]] = set()
        self._leases: list[tuple[Replica, bytes]] = []
        self.route: dict[str, Replica] = {}  # the replica last asked, by room
        self.at: Replica | None = None  # the replica last asked of all
        self.is_exact = True  # false after a stumble: then cancel everywhere, to be sure

    async def ask(self, replica: Replica, name: str, message: Message) -> AnyMessage:
        """Send a job about the request known there as `name`, and wait for its answer.

        Raises:
            TransferError: a pull was refused, or took longer than a room allows one.
            ServingError: what else the room answered, or that it was lost.
        """
        self.at = self.route[replica.room] = replica
        self._touched.add((replica, name))
        try:
            return await replica.call(message, timeout_s=max(self.left_s(), 0.0) + GRACE_S)
        except DeadlineExceeded as late:
            if self.left_s() > SPARE_S:  # not the request's deadline, but that of one READ
                raise TransferError(str(late)) from late
            raise

    def hold(self, replica: Replica, nonce: bytes) -> None:
        """Renew a ticket or reservation until `let_lapse` or `free`; twice is once."""
        if (replica, nonce) in self._leases:
            return
        self._leases.append((replica, nonce))
        replica.leases += 1
        self._house.leases.hold(replica, nonce)

    def let_lapse(self) -> None:
        """Renew nothing more: its new owner does, or nobody wants it."""
        for replica, nonce in self._leases:
            replica.leases -= 1
            self._house.leases.drop(replica, nonce)
        self._leases.clear()

    def settle(self, replica: Replica, name: str) -> None:
        """This room holds nothing of it any more."""
        if self.is_exact:
            self._touched.discard((replica, name))
            replica.followers.pop(name, None)

    async def release(self, replica: Replica, name: str, nonce: bytes) -> None:
        """Hand back a ticket or reservation of a request that is complete.

        A room that is lost at this point changes nothing, and is still cancelled by `free`.
        """
        self.let_lapse()
        with contextlib.suppress(ServingError):
            await self.ask(replica, name, Release(nonce=nonce, outcome="released"))
            self.settle(replica, name)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - asyncio.get_running_loop().time()

    def free(self) -> None:
        """Cancel wherever something may be held; does not wait, and survives the request."""
        self.let_lapse()
        for replica, name in self._touched:
            replica.followers.pop(name, None)
            self._house.spawn(replica.cancel(name))
        self._touched.clear()
        self._house.bell.ring()


def expect(reply: AnyMessage, kind: type[M]) -> M:
    """The reply, which must be of this kind.

    Raises:
        ServingError: a room answered out of turn.
    """
    if not isinstance(reply, kind):
        raise ServingError(f"a room answered {type(reply).__name__}, not {kind.__name__}")
    return reply
