"""Tickets, leases, destinations and reservations as tables: the hand-off without sockets.

Pure: no clock, no thread, no I/O. A table maps (state, event) to the next state; a missing row
means that the event changes nothing there. Owner, receiver and rooms keep their records in these
states and move them with these functions alone; `tests/support/explorer.py` walks the same tables.
What the states mean, and the messages that carry the events: docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

LEASE_S = 30.0  # how long an owner keeps memory readable without hearing from anybody
RENEW_S = 5.0  # how often whoever wants it says so
READ_FLOOR_S = 10.0  # a READ is posted only with this much of the lease left


class State(StrEnum):
    """Where a ticket, a destination or a reservation stands."""

    OFFERED = "offered"  # spans are known, content is still being made
    SEALED = "sealed"  # content is complete and signed
    FETCHING = "fetching"  # a READ may be in flight
    VERIFIED = "verified"  # what arrived is what was signed
    RELEASED = "released"  # ended: the receiver has what it wanted
    REFUSED = "refused"  # ended: something was not what was signed
    EXPIRED = "expired"  # ended: the lease ran out
    ABORTED = "aborted"  # ended: cancelled, or its room failed
    HELD = "held"  # memory of one request, nobody else may write
    QUARANTINE = "quarantine"  # memory of no request, a READ may still write
    FREE = "free"  # memory anybody may take
    GRANTED = "granted"  # slots and pages kept for a request that is still in prefill
    TAKEN = "taken"  # the request came for them


class Event(StrEnum):
    """What happens to it."""

    SEAL = "seal"
    RENEW = "renew"
    RELEASE = "release"
    REFUSE = "refuse"
    ABORT = "abort"
    EXPIRE = "expire"
    POST = "post"
    DONE = "done"
    FAIL = "fail"
    MATCH = "match"
    ABANDON = "abandon"
    GIVE = "give"
    TAKE = "take"


ENDED = frozenset({State.RELEASED, State.REFUSED, State.EXPIRED, State.ABORTED})
ENDINGS: Mapping[str, Event] = {  # outcomes as the wire spells them
    "released": Event.RELEASE,
    "refused": Event.REFUSE,
    "expired": Event.EXPIRE,
    "aborted": Event.ABORT,
}

Table = Mapping[tuple[State, Event], State]

OWNER: Table = {
    (State.OFFERED, Event.SEAL): State.SEALED,
    (State.OFFERED, Event.RENEW): State.OFFERED,
    (State.OFFERED, Event.REFUSE): State.REFUSED,
    (State.OFFERED, Event.ABORT): State.ABORTED,
    (State.OFFERED, Event.EXPIRE): State.EXPIRED,
    (State.SEALED, Event.RENEW): State.SEALED,
    (State.SEALED, Event.RELEASE): State.RELEASED,
    (State.SEALED, Event.REFUSE): State.REFUSED,
    (State.SEALED, Event.ABORT): State.ABORTED,
    (State.SEALED, Event.EXPIRE): State.EXPIRED,
}

RECEIVER: Table = {
    (State.SEALED, Event.POST): State.FETCHING,
    (State.SEALED, Event.REFUSE): State.REFUSED,
    (State.SEALED, Event.ABORT): State.ABORTED,
    (State.SEALED, Event.EXPIRE): State.EXPIRED,
    (State.FETCHING, Event.MATCH): State.VERIFIED,
    (State.FETCHING, Event.REFUSE): State.REFUSED,
    (State.FETCHING, Event.FAIL): State.ABORTED,
    (State.FETCHING, Event.ABORT): State.ABORTED,
    (State.VERIFIED, Event.RELEASE): State.RELEASED,
}

DESTINATION: Table = {
    (State.HELD, Event.POST): State.FETCHING,
    (State.HELD, Event.GIVE): State.FREE,
    (State.FETCHING, Event.DONE): State.HELD,
    (State.FETCHING, Event.FAIL): State.HELD,
    (State.FETCHING, Event.ABANDON): State.QUARANTINE,
    (State.QUARANTINE, Event.DONE): State.FREE,
    (State.QUARANTINE, Event.FAIL): State.FREE,
}

RESERVATION: Table = {
    (State.GRANTED, Event.RENEW): State.GRANTED,
    (State.GRANTED, Event.TAKE): State.TAKEN,
    (State.GRANTED, Event.RELEASE): State.RELEASED,
    (State.GRANTED, Event.ABORT): State.ABORTED,
    (State.GRANTED, Event.EXPIRE): State.EXPIRED,
    (State.TAKEN, Event.RELEASE): State.RELEASED,
    (State.TAKEN, Event.ABORT): State.ABORTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The protocol as data: its tables and its times. Rooms use `RULES`; tests may break a copy."""

    lease_s: float = LEASE_S
    read_floor_s: float = READ_FLOOR_S
    owner: Table = field(default_factory=lambda: OWNER)
    receiver: Table = field(default_factory=lambda: RECEIVER)
    destination: Table = field(default_factory=lambda: DESTINATION)
    reservation: Table = field(default_factory=lambda: RESERVATION)


RULES = Rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A ticket at its owner, or a reservation: its state, and the owner's time when it expires."""

    state: State
    until: float


def step(table: Table, state: State, event: Event) -> State | None:
    """The next state, or None when the event changes nothing."""
    return table.get((state, event))


def lease(state: State, now: float, lease_s: float) -> Leased:
    """A new record with a full lease."""
    return Leased(state=state, until=now + lease_s)


def move(table: Table, record: Leased, event: Event, now: float, lease_s: float) -> Leased | None:
    """Apply an event to a leased record, judged by its owner's clock alone.

    A record whose lease has run out expires, whatever the event was, unless its state has no lease.

    Returns:
        The changed record, with a full lease after a renewal; None when nothing changes.
    """
    if now >= record.until and (record.state, Event.EXPIRE) in table:
        event = Event.EXPIRE
    elif event is Event.EXPIRE:
        return None  # not due: somebody else's clock has no say
    state = step(table, record.state, event)
    if state is None:
        return None
    return Leased(state=state, until=now + lease_s if event is Event.RENEW else record.until)


def lease_left(asked_at: float, now: float, lease_s: float) -> float:
    """Seconds of the lease that a receiver may count on after a renewal asked for at `asked_at`.

    Both times are the receiver's. The owner renewed no earlier than it was asked, so this never
    says more than the owner's clock would.
    """
    return asked_at + lease_s - now


def may_read(left_s: float, floor_s: float = READ_FLOOR_S) -> bool:
    """Whether a READ may still be posted."""
    return left_s >= floor_s
