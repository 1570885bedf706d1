"""A READ in pieces: what lands is digested on the way, and adds up to the whole or is refused."""

from __future__ import annotations

import random

import pytest
import torch

from common.errors import Cancelled, DeadlineExceeded, HandoffRefused, TransferError
from common.runtime.place import cut
from common.transfer.link import Pair, part_of
from common.transfer.pieces import IN_FLIGHT
from tests.support.gated import OURS, THEIRS, Pieced

SIZES = [1, 600, 2000, 5000, 1 << 30]  # of a piece; a layer of state has 512 bytes, a page 1,536
MANY = 600


@pytest.mark.parametrize("piece_bytes", SIZES)
def test_pieces_cover_every_unit_once_in_order_and_keep_their_size(piece_bytes):
    stretches = Pieced(1 << 30).target.stretches(OURS)
    pieces = cut(stretches, piece_bytes)
    flat = [(at, unit) for cuts in pieces for at, low, high in cuts for unit in range(low, high)]
    assert flat == [(at, unit) for at, s in enumerate(stretches) for unit in range(s.count)]
    for cuts in pieces:
        sizes = [(high - low) * stretches[at].unit_bytes for at, low, high in cuts]
        assert sum(sizes) <= piece_bytes or sum(high - low for _, low, high in cuts) == 1


@pytest.mark.parametrize("piece_bytes", SIZES)
def test_digests_of_pieces_add_up_to_the_whole_in_any_order(piece_bytes):
    world = Pieced(piece_bytes)
    order = list(range(len(world.pieces)))
    random.Random(piece_bytes).shuffle(order)
    for number in order:
        world.landing.landed(number)
    assert world.landing.signature() == world.target.measure(OURS)
    kinds = {name.partition(":")[0] for name in world.signed}
    assert kinds == {"state", "conv", "latent", "canary_state", "canary_conv"}


@pytest.mark.parametrize("piece_bytes", SIZES)
def test_what_was_signed_arrives_in_pieces_and_is_accepted(piece_bytes):
    world = Pieced(piece_bytes)
    world.fetch(), world.verify()
    assert world.seen == list(range(len(world.pieces))) and world.freed == [True]
    for ours, theirs in ((1, 2), (3, 0)):
        assert torch.equal(world.target.states.state[ours], world.source.states.state[theirs])
        assert torch.equal(world.target.states.conv[ours], world.source.states.conv[theirs])
    ours, theirs = world.target.latents.pages, world.source.latents.pages
    assert torch.equal(ours[list(OURS.pages[:3])], theirs[list(THEIRS.pages[:3])])
    assert torch.equal(ours[7, :, :8], theirs[1, :, :8]) and not ours[7, :, 8:].any()


def test_what_several_peers_have_is_cut_at_the_same_borders():
    world = Pieced(MANY)
    whole = world.pairs()
    halves = [pair_half(pair, which) for pair in whole for which in (0, 1)]
    pieces = world.landing.pieces([(world.peer, halves[::2]), (world.peer, halves[1::2])])
    assert [sum(b.size for _, pairs in piece for b, _ in pairs) for piece in pieces] == [
        sum(b.size for _, pairs in piece for b, _ in pairs) for piece in world.pieces
    ]
    world.pieces = pieces
    world.fetch(), world.verify()
    with pytest.raises(AssertionError, match="outside the destination"):
        world.landing.pieces([(world.peer, [pair[::-1] for pair in whole])])


def pair_half(pair: Pair, which: int) -> Pair:
    """The first half of a pair, in whole words, or the second."""
    middle = pair[0].size // 8 * 4
    at, size = (0, middle) if which == 0 else (middle, pair[0].size - middle)
    return part_of(pair[0], at, size), part_of(pair[1], at, size)


def test_a_piece_is_shown_when_its_bytes_are_here_and_others_are_not():
    world = Pieced(MANY)
    before = [torch.cat(world.bytes_of(n, local=True)).clone() for n in range(len(world.pieces))]

    def landed(number: int) -> None:
        world.seen.append(number)
        for n in range(len(world.pieces)):
            ours = torch.cat(world.bytes_of(n, local=True))
            if n <= number:
                assert torch.equal(ours, torch.cat(world.bytes_of(n, local=False)))
            elif n > number + IN_FLIGHT:
                assert torch.equal(ours, before[n])
        world.link.gate = world.link.posted  # what was posted so far may end

    world.link.gate, world.landed = 1, landed
    world.fetch()
    assert world.seen == list(range(len(world.pieces)))


def places_in(world: Pieced) -> list[tuple[int, str]]:
    """Each piece, and the name of the digest that its first byte belongs to."""
    found = []
    for number, cuts in enumerate(cut(world.target.stretches(OURS), MANY)):
        at, low, _ = cuts[0]
        stretch = world.target.stretches(OURS)[at]
        found.append((number, stretch.names[0 if stretch.kind == "latent" else low]))
    return found


@pytest.mark.parametrize(("number", "name"), places_in(Pieced(MANY)))
def test_a_bit_flipped_in_any_piece_is_found_and_named(number, name):
    world = Pieced(MANY)
    world.bytes_of(number, local=False)[0][0] ^= 1
    world.fetch()
    with pytest.raises(HandoffRefused) as refused:
        world.verify()
    assert refused.value.part == f"digest:{name}"


def test_a_piece_that_was_not_digested_is_missed():
    world = Pieced(MANY)
    world.landed = lambda number: number == 1 or world.landing.landed(number)
    world.fetch()
    with pytest.raises(HandoffRefused, match="digest:state"):
        world.verify()


def test_a_value_that_is_not_finite_is_named_whatever_piece_brought_it():
    world = Pieced(MANY)
    world.source.latents.pages[9, 0, 3, 2] = float("inf")
    world.signed = world.source.measure(THEIRS).sums
    world.fetch()
    with pytest.raises(HandoffRefused) as refused:
        world.verify()
    assert refused.value.part == "finite:latent"


@pytest.mark.parametrize("why", [Cancelled, DeadlineExceeded])
def test_giving_up_between_pieces_posts_no_more_and_waits_for_those_in_flight(why):
    world = Pieced(MANY)
    world.link.gate = 4
    untouched = [torch.cat(world.bytes_of(n, local=True)).clone() for n in range(8, 12)]
    with pytest.raises(why):
        if why is Cancelled:
            world.fetch(cancelled=lambda: len(world.seen) == 4)
        else:
            world.fetch(deadline_s=0.05)
    assert world.seen == [0, 1, 2, 3] and world.link.posted == 4 + IN_FLIGHT
    assert (world.receiver.quarantined, world.freed) == (1, [])
    world.link.gate = 6
    assert world.receiver.sweep() == 0 and world.freed == []
    world.link.gate = 1000
    assert world.receiver.sweep() == 1
    assert (world.receiver.quarantined, world.freed) == (0, [True])
    assert world.seen == [0, 1, 2, 3] and world.link.posted == 4 + IN_FLIGHT
    left = [torch.cat(world.bytes_of(n, local=True)) for n in range(8, 12)]
    assert all(map(torch.equal, left, untouched))


def test_a_peer_that_dies_between_pieces_frees_once_and_the_piece_is_named():
    world = Pieced(MANY)

    def landed(number: int) -> None:
        world.seen.append(number)
        if number == 2:
            world.fabric.kill("source")

    world.link.gate, world.landed = 3, landed
    with pytest.raises(TransferError, match=f"piece 4 of {len(world.pieces)}: agent source"):
        world.fetch(cancelled=lambda: opened(world))
    assert world.seen == [0, 1, 2] and world.freed == [True]
    assert world.receiver.quarantined == 0


def opened(world: Pieced) -> bool:
    """Never a cancel; lets everything in flight end."""
    world.link.gate = 1000
    return False


def test_digests_are_prepared_once_while_the_first_pieces_travel():
    world = Pieced(MANY)
    told: list[tuple[int, int]] = []  # pieces posted and shown

    def posted() -> None:
        told.append((world.link.posted, len(world.seen)))
        world.landing.prepare()

    world.posted = posted
    world.fetch(), world.verify()
    assert told == [(IN_FLIGHT, 0)] and world.freed == [True]


def test_a_fault_while_digests_are_prepared_is_raised_when_nothing_is_in_progress():
    world = Pieced(MANY)
    world.link.gate = 0

    def posted() -> None:
        raise ArithmeticError("a copy failed")

    world.posted = posted
    with pytest.raises(ArithmeticError, match="a copy failed"):
        world.fetch(cancelled=lambda: opened(world))
    assert world.seen == [] and world.freed == [True]
    assert world.link.posted == IN_FLIGHT and world.receiver.quarantined == 0


def test_a_fault_while_a_piece_is_looked_at_is_raised_when_nothing_is_in_progress():
    world = Pieced(MANY)

    def landed(number: int) -> None:
        world.seen.append(number)
        if number == 1:
            world.link.gate = 2
            raise ArithmeticError("a launch failed")

    world.landed = landed
    with pytest.raises(ArithmeticError, match="a launch failed"):
        world.fetch(cancelled=lambda: opened(world))
    assert world.seen == [0, 1] and world.freed == [True]
    assert world.link.posted <= 2 + IN_FLIGHT and world.receiver.quarantined == 0
