"""The protocol of the hand-off: no state breaks a promise, and every broken protocol is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contract.protocol import RULES, Event, Rules, State, objection
from tests.support.explorer import MOMENTS, Broken, Explorer, Faults, Habits

EVERYTHING = Faults(losses=1, repeats=1, crashes=1, expiries=2)
ORDERLY = Faults(
    ordered=True, leases=False
)  # every message arrives in turn: no lease may be needed
TABLES = ("owner", "receiver", "destination", "reservation", "router")


def test_no_state_of_two_requests_breaks_a_promise_and_every_row_is_taken(capsys):
    calm = Explorer()
    worlds = calm.walk()
    stormy = Explorer(faults=EVERYTHING)
    moments = stormy.moments(worlds)
    assert len(moments) == len(MOMENTS)
    early = Explorer(faults=EARLY["a loss, a crash, an expiry"], early=True)
    pulled = early.walk([early.start(alone=True)], limit=25_000)
    states = {*worlds, *stormy.walk(moments, limit=22_000), *pulled}
    rows = calm.rows + stormy.rows + early.rows
    with capsys.disabled():
        print(f"\nprotocol: {len(states)} distinct states, {len(rows)} rows of the tables taken")
    assert len(states) >= 50_000
    assert {(table, *row) for table in TABLES for row in getattr(RULES, table)} == set(rows)


ALONE = {  # one request, every state
    "late and in order": replace(ORDERLY, expiries=2),
    "a loss and an expiry": Faults(losses=1, expiries=1),
    "a loss and a repetition": Faults(losses=1, repeats=1),
    "a loss and a crash": Faults(losses=1, crashes=1),
}

# A message that waits counts, so where messages are repeated fewer than six would block each other.
EARLY = {  # one request whose halves are pulled as they become final
    "late and in order": replace(ORDERLY, expiries=1, in_flight=3),
    "a repetition, a crash": Faults(repeats=1, crashes=1, in_flight=6),
    "a loss, a crash, an expiry": Faults(losses=1, crashes=1, expiries=1),
    "calm": Faults(in_flight=3),
}


@pytest.mark.parametrize("faults", ALONE.values(), ids=ALONE.keys())
def test_one_request_always_has_a_way_to_a_clean_end(faults):
    walker = Explorer(faults=faults)
    assert len(walker.walk([walker.start(alone=True)])) > 1000


def test_a_request_pulled_early_has_a_way_to_a_clean_end_by_messages_alone():
    walker = Explorer(faults=replace(ORDERLY, in_flight=3), early=True)
    assert len(walker.walk([walker.start(alone=True)])) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("faults", EARLY.values(), ids=EARLY.keys())
def test_a_request_pulled_early_survives_faults(faults):
    walker = Explorer(faults=faults, early=True)
    assert len(walker.walk([walker.start(alone=True)], limit=300_000)) > 20_000


@pytest.mark.slow
def test_many_states_of_two_requests_pulled_early_break_no_promise():
    walker = Explorer(faults=EVERYTHING, early=True)
    calm = Explorer(faults=Faults(in_flight=3), early=True).walk(limit=60_000)
    walker.walk(walker.moments(calm), limit=200_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        Faults(crashes=1, expiries=2),
        Faults(crashes=1, repeats=1),
        Faults(losses=1, repeats=1, expiries=1),
    ],
    ids=["a crash, two expiries", "a crash, a repetition", "a loss, a repetition, an expiry"],
)
def test_one_request_survives_faults_that_come_together(faults):
    walker = Explorer(faults=faults)
    assert len(walker.walk([walker.start(alone=True)])) > 20_000


@pytest.mark.slow
def test_without_faults_messages_alone_free_everything_and_no_lease_is_needed():
    assert len(Explorer(faults=ORDERLY).walk()) > 50_000


@pytest.mark.slow
def test_many_states_of_two_requests_break_no_promise():
    walker = Explorer(faults=EVERYTHING)
    walker.walk(walker.moments(Explorer().walk()), limit=200_000)


# --- mutations --------------------------------------------------------------------------------


def without(table: str, state: State, event: Event) -> Rules:
    """The rules with one row less."""
    rows = {row: after for row, after in getattr(RULES, table).items() if row != (state, event)}
    return replace(RULES, **{table: rows})


def turned(table: str, state: State, event: Event, after: State) -> Rules:
    """The rules with one row added, or leading elsewhere."""
    return replace(RULES, **{table: {**getattr(RULES, table), (state, event): after}})


def blind_to_epochs(*, is_used: bool, **_: int) -> str:
    return "nonce" if is_used else ""


def blind_to_use(*, is_used: bool, **epochs: int) -> str:
    return objection(is_used=False, **epochs)


MUTATIONS = {
    "a late READ's memory is free at once": turned(
        "destination", State.FETCHING, Event.ABANDON, State.FREE
    ),
    "quarantine does not end with the READ": without("destination", State.QUARANTINE, Event.DONE),
    "quarantine does not end with the peer": without("destination", State.QUARANTINE, Event.FAIL),
    "memory is free when its READ is done": turned(
        "destination", State.FETCHING, Event.DONE, State.FREE
    ),
    "a failed READ stays in quarantine": turned(
        "destination", State.FETCHING, Event.FAIL, State.QUARANTINE
    ),
    "a mismatch counts as verified": turned(
        "receiver", State.FETCHING, Event.REFUSE, State.VERIFIED
    ),
    "a used nonce is taken again": replace(RULES, objection=blind_to_use),
    "an old epoch is taken": replace(RULES, objection=blind_to_epochs),
    "sealed tickets do not expire": without("owner", State.SEALED, Event.EXPIRE),
    "offered tickets survive a cancel": without("owner", State.OFFERED, Event.ABORT),
    "sealed tickets survive a cancel": without("owner", State.SEALED, Event.ABORT),
    "the owner does not hear that it may free": without("owner", State.SEALED, Event.RELEASE),
    "the owner does not hear of a refusal": without("owner", State.SEALED, Event.REFUSE),
    "reservations do not expire": without("reservation", State.GRANTED, Event.EXPIRE),
    "reservations survive a cancel": without("reservation", State.GRANTED, Event.ABORT),
    "running requests survive a cancel": without("reservation", State.TAKEN, Event.ABORT),
    "an unused reservation is not given back": without("reservation", State.GRANTED, Event.RELEASE),
    "a failed request finishes later": turned("router", State.FAILED, Event.FINISH, State.FINISHED),
    "a failed request is accepted later": turned(
        "router", State.FAILED, Event.ACCEPT, State.STREAMING
    ),
    "a stream cannot be left": without("router", State.STREAMING, Event.QUIT),
    "what arrived is not compared": Habits(receiver_compares=False),
    "a request needs no reservation": Habits(receiver_reserves=False),
    "the router does not cancel": Habits(router_cancels=False),
    "the receiver does not tell the owner": Habits(receiver_tells=False),
    "passes are not counted": Habits(router_counts=False),
    "a place is freed without looking": Habits(owner_looks=False),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_broken_protocol_is_found(mutation: Rules | Habits):
    rules = mutation if isinstance(mutation, Rules) else RULES
    habits = mutation if isinstance(mutation, Habits) else Habits()
    with pytest.raises(Broken):
        for faults in ALONE.values():
            walker = Explorer(rules=rules, habits=habits, faults=faults)
            walker.walk([walker.start(alone=True)])
        walker = Explorer(rules=rules, habits=habits, faults=Faults(crashes=1, repeats=1))
        calm = Explorer()
        walker.walk(walker.moments(calm.walk([calm.start(alone=True)])))


EARLY_MUTATIONS = {
    "a half is READ before it is final": Habits(owner_waits=False),
    "what was pulled is used before its seal": Habits(receiver_seals=False),
    "a job reads again what is being pulled": Habits(
        receiver_joins=False, receiver_remembers=False
    ),
    "an offer that was pulled is pulled again": Habits(receiver_remembers=False),
    "a pull outlives its reservation": Habits(receiver_stops=False),
    "a pull between two READs is waited for": Habits(receiver_rests=False),
    "an offer of an old epoch is pulled": replace(RULES, objection=blind_to_epochs),
    "the owner does not hear that its offer was refused": without(
        "owner", State.OFFERED, Event.REFUSE
    ),
    "the owner does not hear that its offer was given up": without(
        "owner", State.OFFERED, Event.ABORT
    ),
    "memory that is pulled is free at once": turned(
        "destination", State.FETCHING, Event.ABANDON, State.FREE
    ),
    "reservations that are pulled do not expire": without(
        "reservation", State.GRANTED, Event.EXPIRE
    ),
}


FAR = {  # some ten seconds each
    "an offer of an old epoch is pulled",
    "a pull between two READs is waited for",
    "reservations that are pulled do not expire",
}


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=name, marks=[pytest.mark.slow] if name in FAR else [])
        for name, mutation in EARLY_MUTATIONS.items()
    ],
)
def test_a_broken_pull_is_found(mutation: Rules | Habits):
    rules = mutation if isinstance(mutation, Rules) else RULES
    habits = mutation if isinstance(mutation, Habits) else Habits()
    with pytest.raises(Broken):
        for faults in EARLY.values():
            walker = Explorer(rules=rules, habits=habits, faults=faults, early=True)
            walker.walk([walker.start(alone=True)], limit=25_000)
