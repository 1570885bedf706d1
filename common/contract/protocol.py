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
from typing import Protocol

LEASE_S = 30.0  # how long an owner keeps memory readable without hearing from anybody
RENEW_S = 5.0  # how often whoever wants it says so
READ_FLOOR_S = 10.0  # a READ is posted only with this much of the lease left


class State(StrEnum):
    """Where a ticket, a destination or a reservation stands."""

    OFFERED = "offered"  # spans are known, content is still being made
    SEALED = "sealed"  # content is complete and signed
    PULLING = "pulling"  # portions of an offer are READ as they become final; no seal yet
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
    WAITING = "waiting"  # the router wants a reservation
    PREFILLING = "prefilling"  # the router waits for a ticket
    HANDING = "handing"  # the router waits for decode to accept it
    STREAMING = "streaming"  # tokens come
    FINISHED = "finished"  # ended with a finish reason
    FAILED = "failed"  # ended with an error, or because the client left


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
    GRANT = "grant"
    TICKET = "ticket"
    ACCEPT = "accept"
    AGAIN = "again"  # refused: another pass, on the reservation that stands
    RESTART = "restart"  # decode died, or its seat is spent: another pass from the queue
    FINISH = "finish"
    QUIT = "quit"


ENDED = frozenset({State.RELEASED, State.REFUSED, State.EXPIRED, State.ABORTED})
ENDINGS: Mapping[str, Event] = {  # outcomes as the wire spells them
    "released": Event.RELEASE,
    "refused": Event.REFUSE,
    "expired": Event.EXPIRE,
    "aborted": Event.ABORT,
}

Table = Mapping[tuple[State, Event], State]


class Objection(Protocol):
    """The signature of `objection`."""

    def __call__(
        self, *, ticket_epoch: int, producer_epoch: int, known_epoch: int, is_used: bool
    ) -> str:
        """See `objection`."""


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
    (State.OFFERED, Event.POST): State.PULLING,  # the first portion
    (State.OFFERED, Event.SEAL): State.SEALED,  # the job came before any portion was final
    (State.OFFERED, Event.REFUSE): State.REFUSED,
    (State.OFFERED, Event.ABORT): State.ABORTED,
    (State.OFFERED, Event.EXPIRE): State.EXPIRED,
    (State.PULLING, Event.SEAL): State.FETCHING,  # the job joins what is under way
    (State.PULLING, Event.REFUSE): State.REFUSED,
    (State.PULLING, Event.FAIL): State.ABORTED,
    (State.PULLING, Event.ABORT): State.ABORTED,
    (State.PULLING, Event.EXPIRE): State.EXPIRED,
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
    (State.TAKEN, Event.REFUSE): State.GRANTED,  # the next pass comes to the same slots and pages
    (State.TAKEN, Event.RELEASE): State.RELEASED,
    (State.TAKEN, Event.ABORT): State.ABORTED,
}


ROUTER: Table = {
    (State.WAITING, Event.GRANT): State.PREFILLING,
    (State.WAITING, Event.QUIT): State.FAILED,
    (State.PREFILLING, Event.TICKET): State.HANDING,
    (State.PREFILLING, Event.FINISH): State.FINISHED,  # the first token was the last one
    (State.PREFILLING, Event.AGAIN): State.PREFILLING,
    (State.PREFILLING, Event.RESTART): State.WAITING,  # a pull was given up, and its seat with it
    (State.PREFILLING, Event.QUIT): State.FAILED,
    (State.HANDING, Event.ACCEPT): State.STREAMING,
    (State.HANDING, Event.AGAIN): State.PREFILLING,
    (State.HANDING, Event.RESTART): State.WAITING,
    (State.HANDING, Event.QUIT): State.FAILED,
    (State.STREAMING, Event.FINISH): State.FINISHED,
    (State.STREAMING, Event.RESTART): State.WAITING,
    (State.STREAMING, Event.QUIT): State.FAILED,
}


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

    A state has a lease when its table lets it expire. Then, once the time is over, whatever
    happens is its expiry; before, nobody's word expires it.

    Returns:
        The changed record, with a full lease after a renewal or on coming under a lease; None when
        nothing changes.
    """
    leased = (record.state, Event.EXPIRE) in table
    if leased and now >= record.until:
        event = Event.EXPIRE
    elif event is Event.EXPIRE:
        return None
    state = step(table, record.state, event)
    if state is None:
        return None
    begins = event is Event.RENEW or (not leased and (state, Event.EXPIRE) in table)
    return Leased(state=state, until=now + lease_s if begins else record.until)


def lease_left(asked_at: float, now: float, lease_s: float) -> float:
    """Seconds of the lease that a receiver may count on after a renewal asked for at `asked_at`.

    Both times are the receiver's. The owner renewed no earlier than it was asked, so this never
    says more than the owner's clock would.
    """
    return asked_at + lease_s - now


def objection(*, ticket_epoch: int, producer_epoch: int, known_epoch: int, is_used: bool) -> str:
    """Why a receiver must not touch a ticket: the refused part, or "" when it may claim it.

    Args:
        ticket_epoch: the epoch of the producer that made the ticket.
        producer_epoch: of the endpoint that came with it.
        known_epoch: the latest epoch of that producer this receiver has met.
        is_used: whether this receiver took the ticket's nonce before.
    """
    if ticket_epoch != producer_epoch or ticket_epoch < known_epoch:
        return "epoch"
    return "nonce" if is_used else ""


def may_read(left_s: float, floor_s: float = READ_FLOOR_S) -> bool:
    """Whether a READ may still be posted."""
    return left_s >= floor_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The protocol in one piece. Rooms use `RULES`; a test may break a copy to see it found out."""

    lease_s: float = LEASE_S
    read_floor_s: float = READ_FLOOR_S
    owner: Table = field(default_factory=lambda: OWNER)
    receiver: Table = field(default_factory=lambda: RECEIVER)
    destination: Table = field(default_factory=lambda: DESTINATION)
    reservation: Table = field(default_factory=lambda: RESERVATION)
    router: Table = field(default_factory=lambda: ROUTER)
    objection: Objection = objection


RULES = Rules()
