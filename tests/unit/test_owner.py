"""The owner's side: leases judged by its clock, one ending each, nothing held afterwards."""

from __future__ import annotations

import pytest

from common.contract.messages import EmbedPart, Part, Seal
from common.contract.regions import Span
from common.errors import HandoffRefused
from common.transfer.owner import Owner

SEAL = Seal(num_tokens=1, token_hash=b"h", digests={}, first=())
PART = Part(kind="state", span=Span(pool="state", offset=0, size=4))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def owner(clock):
    return Owner("p0", 7, "model", "layout", clock=clock)


def test_a_ticket_names_its_origin_and_an_unguessable_nonce(owner):
    first, second = owner.offer("a", [PART], print), owner.offer("a", [PART], print)
    assert (first.producer, first.epoch, first.model_print, first.layout_print) == (
        "p0",
        7,
        "model",
        "layout",
    )
    assert first.parts == (PART,) and first.lease_s == 30.0
    assert len(first.nonce) == 16 and first.nonce != second.nonce


@pytest.mark.parametrize("outcome", ["released", "refused", "aborted"])
def test_every_ending_is_told_once(owner, outcome):
    ends = []
    nonce = owner.offer("a", [PART], ends.append).nonce
    owner.seal(nonce, SEAL)
    assert owner.release(nonce, outcome) is True
    assert owner.release(nonce, outcome) is False
    assert ends == [outcome] and owner.held() == 0


def test_a_receivers_clock_cannot_expire_a_lease(owner):
    ends = []
    nonce = owner.seal(owner.offer("a", [PART], ends.append).nonce, SEAL).offer.nonce
    owner.release(nonce, "expired")
    assert ends == ["refused"]


def test_an_unknown_outcome_is_an_error(owner):
    with pytest.raises(ValueError, match="`lost` is no outcome"):
        owner.release(b"n", "lost")


def test_a_lease_ends_by_the_owners_clock_unless_renewed(owner, clock):
    ends = []
    nonce = owner.offer("a", [PART], ends.append).nonce
    clock.now += 29
    assert owner.sweep() == 0 and owner.renew([nonce, b"other"]) == (b"other",)
    clock.now += 29
    assert owner.sweep() == 0
    clock.now += 1
    assert owner.sweep() == 1 and ends == ["expired"]
    assert owner.renew([nonce]) == (nonce,)


def test_a_renewal_that_comes_too_late_expires_the_ticket_even_without_a_sweep(owner, clock):
    ends = []
    nonce = owner.offer("a", [PART], ends.append).nonce
    clock.now += 30
    assert owner.renew([nonce]) == (nonce,) and ends == ["expired"]
    with pytest.raises(HandoffRefused, match="lease"):
        owner.seal(nonce, SEAL)


def test_a_ticket_is_sealed_once(owner):
    nonce = owner.offer("a", [PART], print).nonce
    assert owner.seal(nonce, SEAL).seal == SEAL
    with pytest.raises(HandoffRefused, match="sealed already"):
        owner.seal(nonce, SEAL)


def test_an_unsealed_ticket_cannot_have_been_used_up(owner):
    nonce = owner.offer("a", [PART], print).nonce
    assert owner.release(nonce, "released") is False and owner.held() == 1


def test_a_cancel_ends_all_tickets_of_its_request_and_no_other(owner):
    ends = []
    owner.offer("a", [PART], lambda outcome: ends.append(("a", outcome)))
    owner.offer("a", [PART], lambda outcome: ends.append(("a", outcome)))
    owner.offer("b", [PART], lambda outcome: ends.append(("b", outcome)))
    assert owner.abort("a") == 2
    assert ends == [("a", "aborted")] * 2 and owner.held() == 1


def test_embeddings_are_sealed_from_the_start_and_probes_are_not_counted(owner):
    ends = []
    part = EmbedPart(image=b"i", tokens=1, span=Span(pool="embed", offset=0, size=4), digest=1)
    ticket = owner.offer_embeds("a", [part], ends.append, probe=True)
    assert ticket.parts == (part,) and owner.held() == 0
    assert owner.release(ticket.nonce, "released") and ends == ["released"]


def test_a_callback_may_call_the_owner_again(owner):
    second = owner.offer("b", [PART], print)
    first = owner.offer("a", [PART], lambda _: owner.release(second.nonce, "aborted"))
    owner.release(first.nonce, "aborted")
    assert owner.held() == 0
