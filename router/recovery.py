"""Whether a journey that stumbled may go on, and what it should stay away from.

A refused hand-off is prefilled again `reprefills` times. A death is survived `replays` times, but
a request under which two replicas of one room died is suspected of killing them. Knows nothing of
how a pass is made.
"""

from __future__ import annotations

from collections import Counter

from common.config.settings import RouterSettings
from common.errors import HandoffRefused, RoomLost, TransferError
from common.observe.metrics import Tally
from router.replica import Replica

DEATHS_OF_ONE_ROOM = 2  # the second is an error
_GIVER = {"decode": "prefill", "prefill": "encoder"}  # whose ticket each room pulls
_TIMING = (
    "lease",
    "reservation",
    "nonce",
    "epoch",
)  # parts refused when messages cross or are late


class Recovery:
    """The stumbles of one request."""

    def __init__(self, settings: RouterSettings, tally: Tally, *, is_probe: bool) -> None:
        """No stumble yet. A probe may not stumble: its refusal is the answer."""
        self._tally = tally
        self._reprefills = 0 if is_probe else settings.reprefills
        self._replays = 0 if is_probe else settings.replays
        self._refusals = 0
        self._deaths: Counter[str] = Counter()
        self.avoid: set[str] = set()  # ids of replicas to take only when there is no other

    @property
    def stumbles(self) -> int:
        """Refusals and deaths so far."""
        return self._refusals + self._deaths.total()

    def after_refusal(
        self, refused: TransferError, at: Replica | None, route: dict[str, Replica]
    ) -> None:
        """`at` refused what it pulled on this `route`; raise that when it was once too often.

        Raises:
            TransferError: `refused` itself.
        """
        self._refusals += 1
        giver = route.get(_GIVER.get(at.room, "")) if at is not None else None
        if giver is not None:
            self.avoid.add(giver.id)
        if self._refusals > self._reprefills:
            raise refused
        self._tally.add("baton_reprefills_total")

    def after_death(
        self, lost: RoomLost, at: Replica | None, route: dict[str, Replica], *, accepted: bool
    ) -> str:
        """The room that died; raise `lost` when the request must not go on.

        A room that is still connected and reports a loss speaks of the one it pulls from; once
        decode has `accepted` it pulls no more, and itself gave the request up.

        Raises:
            RoomLost: `lost` itself.
        """
        dead = at
        if at is not None and not accepted and not at.wire.closed.is_set():
            dead = route.get(_GIVER.get(at.room, ""), at)
        if dead is None:
            raise lost
        self.avoid.add(dead.id)
        self._deaths[dead.room] += 1
        if self._deaths[dead.room] >= DEATHS_OF_ONE_ROOM:
            raise RoomLost(f"{lost}; two {dead.room} replicas were lost under this request")
        if self._deaths.total() > self._replays:
            raise lost
        self._tally.add("baton_replays_total", died=dead.room)
        return dead.room


def is_canary(refused: TransferError) -> bool:
    """Whether the pair computes differently, as against bytes that did not arrive."""
    return isinstance(refused, HandoffRefused) and refused.part.startswith("canary")


def is_difference(refused: TransferError) -> bool:
    """Whether something arrived, or was promised, otherwise than it should be.

    A READ that broke or took too long, a lease that ended and a ticket of an earlier epoch say
    nothing of that.
    """
    return isinstance(refused, HandoffRefused) and refused.part not in _TIMING


def spends_seat(refused: TransferError, at: Replica | None) -> bool:
    """Whether decode's reservation is lost too.

    It is when decode says so, and when a READ was given up: its destination is in quarantine then.
    """
    if at is None or at.room != "decode":
        return False
    return not isinstance(refused, HandoffRefused) or refused.part == "reservation"
