"""Renew what our requests hold in the rooms, one message a replica and period.

A ticket or reservation is renewed by the router until decode accepted the hand-off; after that its
owner knows better. Knows nonces, never what lies behind them.
"""

from __future__ import annotations

import asyncio
import contextlib

from common.contract.messages import Renew
from common.errors import ServingError
from router.replica import Replica


class Leases:
    """The nonces held, by the replica that granted them."""

    def __init__(self, renew_s: float) -> None:
        """`renew_s`: period of renewal."""
        self._renew_s = renew_s
        self._held: dict[Replica, set[bytes]] = {}

    def hold(self, replica: Replica, nonce: bytes) -> None:
        """Renew this from now on."""
        self._held.setdefault(replica, set()).add(nonce)

    def drop(self, replica: Replica, nonce: bytes) -> None:
        """Renew it no more; what was not held is ignored."""
        nonces = self._held.get(replica, set())
        nonces.discard(nonce)
        if not nonces:
            self._held.pop(replica, None)

    async def keep(self) -> None:
        """Renew for ever."""
        while True:
            await asyncio.sleep(self._renew_s)
            held = [(replica, tuple(nonces)) for replica, nonces in self._held.items()]
            await asyncio.gather(*(self._renew(*one) for one in held))

    async def _renew(self, replica: Replica, nonces: tuple[bytes, ...]) -> None:
        # A lease that could not be renewed shows when it is used: the hand-off is refused.
        with contextlib.suppress(ServingError):
            await replica.call(Renew(nonces=nonces), timeout_s=self._renew_s)
