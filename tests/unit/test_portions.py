"""Memory that becomes final in portions: their order, and a READ that goes no further than that."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from common.contract.messages import Offer
from common.errors import Cancelled, DeadlineExceeded, HandoffRefused, RoomLost
from common.runtime.place import cut, portions
from common.transfer.gate import Gate
from common.transfer.pieces import IN_FLIGHT
from services.prefill.early import Passing, borders_of
from tests.support.gated import OURS, THEIRS, Pieced

BORDERS, FINAL_PAGES = (1, 3), 2


def offer_of(borders: tuple[int, ...] = BORDERS, final_pages: int = FINAL_PAGES) -> Offer:
    return Offer(
        nonce=b"n" * 16,
        producer="source",
        epoch=1,
        model_print="",
        layout_print="",
        parts=(),
        lease_s=30.0,
        final_pages=final_pages,
        borders=borders,
    )


@pytest.mark.parametrize(
    ("layers", "groups", "borders"),
    [
        (69, 12, (5, 11, 17, 23, 28, 34, 40, 46, 51, 57, 63, 69)),
        (6, 3, (2, 4, 6)),
        (3, 12, (1, 2, 3)),
        (6, 1, (6,)),
        (0, 3, ()),
    ],
)
def test_groups_are_about_equal_and_none_is_empty(layers, groups, borders):
    assert borders_of(layers, groups) == borders


@pytest.mark.parametrize("piece_bytes", [1, 600, 1 << 30])
def test_portions_cover_every_unit_once_and_no_piece_crosses_one(piece_bytes):
    world = Pieced(piece_bytes, offer_of())
    stretches = world.target.stretches(OURS)
    parts = portions(stretches, FINAL_PAGES, BORDERS)
    kinds = [
        [(stretches[at].kind, low, high) for at, low, high in part if low < high] for part in parts
    ]
    canary = [("canary_state", 0, 3), ("canary_conv", 0, 3)]
    assert [sorted(part) for part in kinds] == [
        sorted([("latent", 0, 2), *canary]),
        [("conv", 0, 1), ("state", 0, 1)],
        [("conv", 1, 3), ("state", 1, 3)],
        [("latent", 2, 4)],
    ]
    whole = {
        (at, n)
        for cuts in cut(stretches, 1 << 30)
        for at, low, high in cuts
        for n in range(low, high)
    }
    units = [
        (at, n) for cuts in world.landing._cuts for at, low, high in cuts for n in range(low, high)
    ]
    assert len(units) == len(set(units)) and set(units) == whole
    for number, cuts in enumerate(world.landing._cuts):
        part = parts[world.landing.portion_of[number]]
        for at, low, high in cuts:
            assert any(at == other and start <= low < high <= end for other, start, end in part)


@pytest.mark.parametrize(
    ("borders", "final_pages"),
    [((1, 2), 2), ((2, 1, 3), 2), ((1, 1, 3), 2), ((1, 3), 5), ((1, 3), -1)],
)
def test_portions_that_are_none_of_the_place_are_refused(borders, final_pages):
    with pytest.raises(ValueError, match=r"ascend|final"):
        Pieced(600, offer_of(borders, final_pages))


def test_a_read_goes_as_far_as_the_gate_and_arrives_whole():
    world = Pieced(600, offer_of())
    gate, of = Gate(world.landing.portion_of), world.landing.portion_of
    fetching = threading.Thread(target=world.fetch, kwargs={"gate": gate})
    fetching.start()
    for portion in range(4):
        time.sleep(0.02)
        here = sum(number < portion for number in of)
        assert world.seen == list(range(here)) and world.link.posted == here
        gate.raise_to(portion + 1)
        gate.raise_to(portion)  # late news
        wait_until(lambda below=portion + 1: len(world.seen) == sum(n < below for n in of))
    fetching.join(5)
    world.verify()
    assert world.freed == [True] and world.receiver.quarantined == 0
    assert torch.equal(world.target.states.state[1], world.source.states.state[2])
    assert gate.opened_at > 0


def wait_until(claim) -> None:
    until = time.monotonic() + 5
    while not claim():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_is_written_after_it_was_said_to_be_final_is_refused_by_name():
    world = Pieced(600, offer_of())
    gate = Gate(world.landing.portion_of)
    fetching = threading.Thread(target=world.fetch, kwargs={"gate": gate})
    fetching.start()
    gate.raise_to(2)
    wait_until(lambda: len(world.seen) == sum(n < 2 for n in world.landing.portion_of))
    world.source.states.state[THEIRS.slot, 0, 0, 0, 0] += 1
    world.signed = world.source.measure(THEIRS).sums  # the seal is of the memory as it is then
    gate.raise_to(4)
    fetching.join(5)
    with pytest.raises(HandoffRefused) as refused:
        world.verify()
    assert refused.value.part == "digest:state:0"


@pytest.mark.parametrize("why", ["cancel", "owner"])
def test_giving_up_between_two_portions_frees_at_once(why):
    world = Pieced(600, offer_of())
    gate, left = Gate(world.landing.portion_of), []
    gate.raise_to(2)
    if why == "owner":
        threading.Timer(0.05, gate.fail, [RoomLost("the owner is gone")]).start()
    else:
        threading.Timer(0.05, left.append, [True]).start()
    with pytest.raises(RoomLost if why == "owner" else Cancelled):
        world.fetch(gate=gate, cancelled=lambda: bool(left))
    assert world.freed == [True] and world.receiver.quarantined == 0


def test_a_failure_of_the_gate_waits_for_what_is_in_flight():
    world = Pieced(600, offer_of())
    gate = Gate(world.landing.portion_of)
    gate.raise_to(3)
    world.link.gate = 2
    threading.Timer(0.05, gate.fail, [RoomLost("the owner is gone")]).start()
    threading.Timer(0.1, setattr, [world.link, "gate", 1000]).start()
    with pytest.raises(RoomLost):
        world.fetch(gate=gate)
    assert world.link.posted <= 2 + IN_FLIGHT and world.freed == [True]


def test_waiting_for_the_owner_is_not_the_reads_time_and_a_late_piece_is():
    world = Pieced(600, offer_of())
    gate = Gate(world.landing.portion_of)
    gate.raise_to(1)
    threading.Timer(0.4, gate.raise_to, [4]).start()
    world.fetch(gate=gate, deadline_s=0.2)  # longer than that on the way
    world.verify()

    world = Pieced(600, offer_of())
    gate = Gate(world.landing.portion_of)
    gate.raise_to(2)
    world.link.gate = 1
    with pytest.raises(DeadlineExceeded):
        world.fetch(gate=gate, deadline_s=0.1)
    assert world.receiver.quarantined == 1 and world.freed == []
    world.link.gate = 1000
    assert world.receiver.sweep() == 1 and world.freed == [True]


def test_a_gate_that_is_open_cannot_fail():
    gate = Gate([0, 1, 1])
    gate.raise_to(2)
    gate.fail(RoomLost("too late to matter"))
    assert gate.pieces() == 3


def test_a_pass_on_a_cpu_is_final_behind_the_last_layer_of_each_group():
    passing = Passing(layers=(0, 1, 3, 4), borders=(2, 4), device=torch.device("cpu"))
    assert passing.final() == 0
    passing.begin()
    seen = []
    for layer in range(6):
        passing.after(layer)
        seen.append(passing.final())
    assert seen == [1, 2, 2, 2, 3, 3]
    passing.end()
    assert passing.final() == 4
