"""The refusal matrix: whatever is wrong with a hand-off, it is refused, and the part is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from common.contract.regions import Span
from common.errors import HandoffRefused
from tests.support.wire import TOKENS, EmbedHandOff, HandOff

Change = Callable[[HandOff], dict]


def reticket(hand: HandOff, *, seal: dict | None = None, **offer) -> dict:
    """The ticket with some of its fields changed."""
    ticket = hand.ticket
    return {
        "ticket": replace(
            ticket, offer=replace(ticket.offer, **offer), seal=replace(ticket.seal, **(seal or {}))
        )
    }


def spans(hand: HandOff, kind: str, change: Callable[[Span], Span | None]) -> dict:
    """The ticket with the first span of a kind changed, or dropped when `change` returns None."""
    parts, changed = [], False
    for part in hand.ticket.offer.parts:
        if part.kind == kind and not changed:
            changed, span = True, change(part.span)
            if span is None:
                continue
            part = replace(part, span=span)
        parts.append(part)
    return reticket(hand, parts=tuple(parts))


def expire(hand: HandOff) -> dict:
    hand.source.owner.release(hand.ticket.offer.nonce, "aborted")
    return {}


def reuse(hand: HandOff) -> dict:
    hand.check()
    return {}


BEFORE_ANY_BYTE = {
    "another model": ("model_print", lambda hand: reticket(hand, model_print="x")),
    "a producer of another model": (
        "model_print",
        lambda hand: {"producer": replace(hand.source.endpoint, model_print="x")},
    ),
    "another layout": ("layout_print", lambda hand: reticket(hand, layout_print="x")),
    "another producer": ("producer", lambda hand: reticket(hand, producer="p9")),
    "a later epoch": ("epoch", lambda hand: reticket(hand, epoch=2)),
    "an earlier epoch": ("epoch", lambda hand: reticket(hand, epoch=0)),
    "a nonce the producer never gave out": ("lease", lambda hand: reticket(hand, nonce=bytes(16))),
    "a nonce used before": ("nonce", reuse),
    "a lease that ended": ("lease", expire),
    "a lease about to end": ("lease", lambda hand: hand.shorten()),
    "no ranks": ("ranks", lambda hand: reticket(hand, ranks=())),
    "a rank its producer does not have": ("ranks", lambda hand: reticket(hand, ranks=(0, 1))),
    "ranks that are no neighbours": ("ranks", lambda hand: reticket(hand, ranks=(0, 2))),
    "fewer tokens": ("token_count", lambda hand: reticket(hand, seal={"num_tokens": TOKENS - 1})),
    "other tokens": ("token_hash", lambda hand: reticket(hand, seal={"token_hash": bytes(16)})),
}
for kind in ("state", "conv", "latent"):
    part = f"span:{kind}"
    BEFORE_ANY_BYTE |= {
        f"no {kind}": (part, lambda hand, kind=kind: spans(hand, kind, lambda _: None)),
        f"{kind} in another pool": (
            part,
            lambda hand, kind=kind: spans(hand, kind, lambda span: replace(span, pool="embed")),
        ),
        f"{kind} past the end": (
            part,
            lambda hand, kind=kind: spans(hand, kind, lambda span: replace(span, offset=1 << 40)),
        ),
        f"{kind} before the start": (
            part,
            lambda hand, kind=kind: spans(
                hand, kind, lambda span: replace(span, offset=-span.size)
            ),
        ),
        f"{kind} too short": (
            part,
            lambda hand, kind=kind: spans(
                hand, kind, lambda span: replace(span, size=span.size - 4)
            ),
        ),
        f"{kind} between two units": (
            part,
            lambda hand, kind=kind: spans(
                hand, kind, lambda span: replace(span, offset=span.offset - 4)
            ),
        ),
    }
BEFORE_ANY_BYTE["two pages in one place"] = (
    "span:latent",
    lambda hand: spans(
        hand, "latent", lambda span: replace(span, offset=9 * hand.source.latents.page_bytes)
    ),
)


@pytest.mark.parametrize(("part", "change"), BEFORE_ANY_BYTE.values(), ids=BEFORE_ANY_BYTE.keys())
def test_a_wrong_ticket_is_refused_before_any_byte_moves(part: str, change: Change):
    hand = HandOff()
    before = [tensor.clone() for tensor in hand.target.memory()]
    changed = change(hand)
    with pytest.raises(HandoffRefused) as refused:
        hand.run(**changed)
    assert refused.value.part == part
    assert all(torch.equal(a, b) for a, b in zip(before, hand.target.memory(), strict=True))
    assert hand.freed == []


def test_an_untouched_ticket_passes_the_same_way():
    hand = HandOff()
    hand.run()
    assert hand.source.ended == ["released"] and hand.source.owner.held() == 0


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def flip(values: torch.Tensor) -> None:
    bits(values).view(-1)[7] ^= 1


def poison(values: torch.Tensor) -> None:
    values.view(-1)[7] = float("nan")


def forget(values: torch.Tensor) -> None:
    values.zero_()


DAMAGE = {"one bit": flip, "one NaN": poison, "all zeros": forget}
PLACES = {  # what a request has, and the name of its digest
    "state": (lambda room, slot, pages: room.states.state[slot, 1], "state:1"),
    "conv": (lambda room, slot, pages: room.states.conv[slot, 2], "conv:2"),
    "latent": (lambda room, slot, pages: room.latents.pages[pages[1], 0], "latent:3"),
    "last tokens": (lambda room, slot, pages: room.latents.pages[pages[2], 0, :2], "latent:3"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize(("place", "name"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("where", ["in the producer's pool", "on arrival"])
def test_damage_after_signing_is_refused_by_kind_and_layer(where, place, name, damage):
    hand = HandOff()
    if where == "on arrival":
        hand.tamper = lambda: damage(place(hand.target, hand.slot, hand.pages))
    else:
        damage(place(hand.source, 2, (5, 6, 9)))
    with pytest.raises(HandoffRefused) as refused:
        hand.run()
    kind = name.partition(":")[0]
    assert refused.value.part == (f"finite:{kind}" if damage is poison else f"digest:{name}")
    assert hand.source.ended == ["refused"] and hand.freed == [True]


@pytest.mark.parametrize(("place", "name"), PLACES.values(), ids=PLACES.keys())
def test_the_previous_requests_content_is_refused(place, name):
    hand = HandOff()
    stale = place(hand.source, 2, (5, 6, 9)).clone()
    hand.source.absorb(2, (5, 6, 9), TOKENS, b"next")
    hand.ticket = hand.source.publish(2, (5, 6, 9), TOKENS)
    place(hand.source, 2, (5, 6, 9)).copy_(stale)
    with pytest.raises(HandoffRefused) as refused:
        hand.run()
    assert refused.value.part == f"digest:{name}"


@pytest.mark.parametrize("kind", ["state", "conv", "latent"])
def test_another_requests_span_is_refused(kind):
    hand = HandOff()
    hand.source.absorb(3, (1, 2, 3), TOKENS, b"other")
    other = hand.source.publish(3, (1, 2, 3), TOKENS, "other")
    theirs = [part for part in other.offer.parts if part.kind == kind]
    mine = [part for part in hand.ticket.offer.parts if part.kind != kind]
    with pytest.raises(HandoffRefused) as refused:
        hand.run(**reticket(hand, parts=(*mine, *theirs)))
    assert refused.value.part.startswith(f"digest:{kind}:")


@pytest.mark.parametrize("name", ["state:0", "conv:2", "latent:3"])
def test_a_layer_nobody_signed_or_nobody_sent_is_refused(name):
    for signed in (
        lambda sums: {k: v for k, v in sums.items() if k != name},
        lambda sums: sums | {f"{name}9": 1},
    ):
        hand = HandOff()
        with pytest.raises(HandoffRefused) as refused:
            hand.ticket = reticket(hand, seal={"digests": signed(hand.ticket.seal.digests)})[
                "ticket"
            ]
            hand.run()
        assert refused.value.part in (f"digest:{name}", f"digest:{name}9")


def test_a_finite_request_is_not_refused_for_what_lies_behind_its_last_token():
    hand = HandOff()
    hand.source.latents.pages[9, :, 2:] = float("nan")
    hand.run()
    hand.target.latents.zero_rest(hand.pages, TOKENS)
    assert hand.target.latents.pages[0].isfinite().all()


# --- embeddings -------------------------------------------------------------------------------


def test_embeddings_arrive_row_by_row():
    hand = EmbedHandOff()
    for got, start in zip(hand.run(), hand.starts, strict=True):
        assert torch.equal(got, hand.source.view(start))


def parts(hand: EmbedHandOff, at: int = 1, **changed):
    found = list(hand.ticket.parts)
    found[at] = replace(found[at], **changed)
    return replace(hand.ticket, parts=tuple(found))


WRONG_EMBEDS = {
    "an old epoch": ("epoch", lambda hand: replace(hand.ticket, epoch=0)),
    "another layout": ("layout_print", lambda hand: replace(hand.ticket, layout_print="x")),
    "another image": ("token_hash", lambda hand: parts(hand, image=b"third")),
    "another size": ("token_count", lambda hand: parts(hand, tokens=4)),
    "a missing image": (
        "token_count",
        lambda hand: replace(hand.ticket, parts=hand.ticket.parts[:1]),
    ),
    "swapped images": (
        "token_count",
        lambda hand: replace(hand.ticket, parts=hand.ticket.parts[::-1]),
    ),
    "rows past the end": (
        "span:embed",
        lambda hand: parts(
            hand, span=replace(hand.ticket.parts[1].span, offset=30 * hand.arena.row_bytes)
        ),
    ),
    "too few rows": (
        "span:embed",
        lambda hand: parts(
            hand, span=replace(hand.ticket.parts[1].span, size=2 * hand.arena.row_bytes)
        ),
    ),
    "rows of another image": (
        "digest:embed:1",
        lambda hand: parts(
            hand, span=replace(hand.ticket.parts[1].span, offset=7 * hand.arena.row_bytes)
        ),
    ),
}


@pytest.mark.parametrize(("part", "change"), WRONG_EMBEDS.values(), ids=WRONG_EMBEDS.keys())
def test_wrong_embeddings_are_refused_by_part(part, change):
    hand = EmbedHandOff()
    with pytest.raises(HandoffRefused) as refused:
        hand.run(change(hand))
    assert refused.value.part == part


@pytest.mark.parametrize(
    ("damage", "part"),
    [(flip, "digest:embed:0"), (poison, "finite:embed"), (forget, "digest:embed:0")],
)
def test_a_damaged_row_is_refused(damage, part):
    hand = EmbedHandOff()
    damage(hand.source.view(hand.starts[0])[2])
    with pytest.raises(HandoffRefused) as refused:
        hand.run()
    assert refused.value.part == part


def test_embeddings_are_taken_once_and_in_time():
    hand = EmbedHandOff()
    with pytest.raises(HandoffRefused, match="lease"):
        EmbedHandOff().run(lease_left_s=9.9)
    hand.run()
    with pytest.raises(HandoffRefused, match="nonce"):
        hand.run()
