"""The receiver's side: a hand-off in one process, and destinations that stay their READ's."""

from __future__ import annotations

import msgspec
import pytest
import torch

from common.contract.protocol import lease_left, may_read
from common.errors import Cancelled, DeadlineExceeded, HandoffRefused, TransferError
from tests.support.wire import TOKENS, HandOff


def test_what_was_signed_arrives_and_is_accepted():
    hand = HandOff()
    hand.check(), hand.fetch(), hand.verify()
    assert hand.freed == [True]
    assert torch.equal(hand.target.states.state[1], hand.source.states.state[2])
    assert torch.equal(hand.target.latents.pages[[3, 4, 0]], hand.source.latents.pages[[5, 6, 9]])


def test_a_ticket_is_accepted_once():
    hand = HandOff()
    hand.check()
    with pytest.raises(HandoffRefused) as refused:
        hand.check()
    assert refused.value.part == "nonce"


def test_a_refused_ticket_is_used_up_as_well():
    hand = HandOff()
    with pytest.raises(HandoffRefused, match="token_count"):
        hand.check(num_tokens=TOKENS + 1)
    with pytest.raises(HandoffRefused) as refused:
        hand.check()
    assert refused.value.part == "nonce"


def flipped(hand: HandOff) -> HandOff:
    hand.tamper = lambda: hand.target.latents.pages[4, 0, 3, 2].mul_(-1)
    hand.check(), hand.fetch()
    return hand


def test_a_bit_changed_on_arrival_is_refused_by_name():
    with pytest.raises(HandoffRefused) as refused:
        flipped(HandOff()).verify()
    assert refused.value.part == "digest:latent:3"


def test_the_same_change_goes_unseen_without_verification():
    hand = flipped(HandOff(verifying=False))
    hand.verify()
    assert hand.measure().sums != hand.ticket.seal.digests


def test_a_deadline_ends_the_request_and_quarantines_its_destination():
    hand = HandOff()
    hand.fabric.stall("source")
    with pytest.raises(DeadlineExceeded):
        hand.fetch(deadline_s=0.01)
    assert hand.receiver.sweep() == 0
    assert (hand.receiver.quarantined, hand.freed, hand.receiver.must_restart) == (1, [], False)
    hand.fabric.resume("source")
    assert hand.receiver.sweep() == 1
    assert (hand.receiver.quarantined, hand.freed) == (0, [True])


def test_a_cancel_quarantines_and_a_dead_peer_frees():
    hand = HandOff()
    hand.fabric.stall("source")
    with pytest.raises(Cancelled):
        hand.fetch(cancelled=lambda: True)
    hand.fabric.kill("source")
    assert hand.receiver.sweep() == 1 and hand.freed == [True]


def test_at_its_bound_the_quarantine_asks_for_a_restart():
    hand = HandOff()
    hand.fabric.stall("source")
    for _ in range(2):
        with pytest.raises(Cancelled):
            hand.fetch(cancelled=lambda: True)
    assert hand.receiver.must_restart
    hand.fabric.resume("source")
    hand.receiver.sweep()
    assert not hand.receiver.must_restart and hand.freed == [True, True]


def test_a_refused_read_frees_at_once():
    hand = HandOff()
    hand.fabric.kill("source")
    with pytest.raises(TransferError):
        hand.fetch()
    assert hand.freed == [True] and hand.receiver.quarantined == 0


def test_a_read_that_is_done_beats_a_cancel():
    hand = HandOff()
    hand.fetch(cancelled=lambda: True)
    assert hand.freed == [True] and hand.receiver.quarantined == 0


def test_a_ticket_of_an_older_epoch_is_refused_though_its_endpoint_agrees():
    hand = HandOff()
    newer = msgspec.structs.replace(hand.source.endpoint, epoch=2)
    offer = msgspec.structs.replace(hand.ticket.offer, epoch=2, nonce=b"newer")
    hand.check(ticket=msgspec.structs.replace(hand.ticket, offer=offer), producer=newer)
    with pytest.raises(HandoffRefused) as refused:
        hand.check()
    assert refused.value.part == "epoch"


def test_what_a_renewal_leaves_counts_from_when_it_was_asked_for():
    assert lease_left(asked_at=100.0, now=100.5, lease_s=30.0) == 29.5
    assert may_read(10.0) and not may_read(9.99)
