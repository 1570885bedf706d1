"""The owner's side: leases judged by its clock, one ending each, nothing held afterwards."""

from __future__ import annotations

import pytest

from common.contract.messages import EmbedPart, Part, Seal
from common.contract.regions import Span
from common.errors import HandoffRefused
from common.transfer.owner import Early, Owner

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


def offered_early(owner: Owner, final: list[int], ends: list[str]) -> bytes:
    early = Early(final_pages=2, borders=(2, 3), final=lambda: final[0])
    offer = owner.offer("a", [PART], ends.append, early=early)
    assert (offer.final_pages, offer.borders, offer.portions) == (2, (2, 3), 4)
    return offer.nonce


def test_an_early_offer_says_what_is_final_and_all_of_it_once_it_is_sealed(owner):
    final, ends = [0], []
    nonce = offered_early(owner, final, ends)
    assert owner.final(nonce) == 0
    final[0] = 3
    assert owner.final(nonce) == 3
    owner.seal(nonce, SEAL)
    assert owner.final(nonce) == 4
    owner.release(nonce, "released")
    with pytest.raises(HandoffRefused, match="lease"):
        owner.final(nonce)


def test_asking_what_is_final_renews_the_lease_and_cannot_revive_it(owner, clock):
    ends = []
    nonce = offered_early(owner, [1], ends)
    clock.now += 29
    assert owner.final(nonce) == 1
    clock.now += 29
    assert owner.final(nonce) == 1
    clock.now += 30
    with pytest.raises(HandoffRefused, match="lease"):
        owner.final(nonce)
    assert ends == ["expired"]


@pytest.mark.parametrize("outcome", ["refused", "aborted"])
def test_an_early_offer_ends_before_its_seal_when_its_receiver_says_so(owner, outcome):
    ends = []
    nonce = offered_early(owner, [1], ends)
    assert owner.release(nonce, outcome) and ends == [outcome]
    with pytest.raises(HandoffRefused, match="before it was sealed"):
        owner.seal(nonce, SEAL)


def test_an_ordinary_offer_has_one_portion_which_is_final_with_its_seal(owner):
    offer = owner.offer("a", [PART], print)
    assert (offer.portions, owner.final(offer.nonce)) == (1, 0)
    owner.seal(offer.nonce, SEAL)
    assert owner.final(offer.nonce) == 1
