"""What makes a ticket, or what arrived, unacceptable: every check, each naming the part it refuses.

Pure functions in two groups. `check_*` compare a ticket with what this room knows, before any byte
moves; `match_*` compare what arrived with what was signed. Counting, nonces and READs: receiver.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.contract.messages import CacheTicket, EmbedTicket, Endpoint, Offer
from common.contract.regions import Span
from common.errors import HandoffRefused, TransferError
from common.ops.digest import Signature
from common.transfer.link import Pair, pair_spans, pool_of

POOLS = {
    "state": "state",
    "conv": "conv",
    "latent": "latent",
    "canary_state": "state",
    "canary_conv": "conv",
    "embed": "embed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much memory a kind must cover: `count` units (slots, pages, rows) of `unit` bytes."""

    unit: int
    count: int


def check_origin(
    ticket: EmbedTicket | CacheTicket | Offer,
    producer: Endpoint,
    *,
    model_print: str,
    layout_print: str,
) -> None:
    """Refuse a ticket of another model, layout or producer.

    Raises:
        HandoffRefused: model_print, layout_print or producer.
    """
    head = ticket.offer if isinstance(ticket, CacheTicket) else ticket
    _same("model_print", head.model_print, model_print)
    _same("layout_print", head.layout_print, layout_print)
    _same("model_print", producer.model_print, model_print)
    _same("layout_print", producer.layout_print, layout_print)
    _same("producer", head.producer, producer.id)


def check_tokens(ticket: CacheTicket, *, num_tokens: int, token_hash: bytes) -> None:
    """Refuse a ticket that stands for other tokens.

    Raises:
        HandoffRefused: token_count or token_hash.
    """
    _same("token_count", ticket.seal.num_tokens, num_tokens)
    _same("token_hash", ticket.seal.token_hash.hex(), token_hash.hex())


def check_ranks(offer: Offer, producer: Endpoint) -> None:
    """Refuse a ticket of ranks that its producer does not have, or that are no neighbours.

    Raises:
        HandoffRefused: ranks.
    """
    first, count = min(offer.ranks, default=0), len(offer.ranks)
    if not count or offer.ranks != tuple(range(first, first + count)):
        raise HandoffRefused("ranks", f"{list(offer.ranks)} are no run of neighbours")
    if first < 0 or first + count > 1 + len(producer.ranks):
        raise HandoffRefused(
            "ranks", f"it names {list(offer.ranks)}, its producer has {1 + len(producer.ranks)}"
        )


def check_spans(
    kinds: Mapping[str, Sequence[Span]], producer: Endpoint, expected: Mapping[str, Extent]
) -> None:
    """Refuse spans that are missing, unasked for, misplaced, out of range, or overlap.

    Raises:
        HandoffRefused: span:<kind>.
    """
    for kind in sorted({*kinds, *expected}):
        part, spans = f"span:{kind}", kinds.get(kind, ())
        extent = expected.get(kind, Extent(unit=1, count=0))
        size = sum(span.size for span in spans)
        if size != extent.unit * extent.count:
            raise HandoffRefused(
                part, f"{size} bytes are offered, {extent.unit * extent.count} are needed"
            )
        for span in spans:
            _check_span(part, kind, span, producer, extent.unit)
        ends = sorted((span.offset, span.offset + span.size) for span in spans)
        if any(end > start for (_, end), (start, _) in pairwise(ends)):
            raise HandoffRefused(part, "two spans overlap")


def spans_of(offer: Offer) -> dict[str, list[Span]]:
    """An offer's spans by kind, in the offer's order."""
    kinds: dict[str, list[Span]] = {}
    for part in offer.parts:
        kinds.setdefault(part.kind, []).append(part.span)
    return kinds


def pair_parts(ticket: CacheTicket, local: Mapping[str, Sequence[Span]]) -> list[Pair]:
    """What to READ where: a checked ticket's spans against this room's, kind by kind.

    Args:
        ticket: checked with `check_spans`.
        local: destination spans by kind, in order.

    Raises:
        TransferError: a kind's sizes differ.
    """
    remote = spans_of(ticket.offer)
    return [
        pair for kind, spans in local.items() for pair in pair_spans(spans, remote.get(kind, ()))
    ]


def check_images(
    ticket: EmbedTicket, producer: Endpoint, images: Sequence[tuple[bytes, int]], row_bytes: int
) -> None:
    """Refuse embeddings of other images than the prompt was built with.

    Args:
        ticket: the encoder's.
        producer: the encoder.
        images: (content hash, tokens) in the prompt's order.
        row_bytes: bytes of one embedding.

    Raises:
        HandoffRefused: token_count, token_hash or span:embed.
    """
    _same("token_count", [part.tokens for part in ticket.parts], [tokens for _, tokens in images])
    _same(
        "token_hash",
        [part.image.hex() for part in ticket.parts],
        [image.hex() for image, _ in images],
    )
    for part in ticket.parts:
        check_spans(
            {"embed": [part.span]}, producer, {"embed": Extent(unit=row_bytes, count=part.tokens)}
        )


def match(signed: Mapping[str, int], arrived: Signature) -> None:
    """Refuse memory that is not finite, not what was signed, or not all of it.

    Raises:
        HandoffRefused: finite:<kind>, or digest:<kind>:<layer>.
    """
    if not arrived.unsound and arrived.sums == signed:
        return
    for name in arrived.unsound:
        kind, _, layer = name.partition(":")
        raise HandoffRefused(
            f"finite:{kind}", f"layer {layer or '-'} holds a value that is not finite"
        )
    for name in [*arrived.sums, *signed]:
        if name not in signed:
            raise HandoffRefused(f"digest:{name}", "it was not signed")
        if name not in arrived.sums:
            raise HandoffRefused(f"digest:{name}", "it was signed and did not arrive")
        if signed[name] != arrived.sums[name]:
            raise HandoffRefused(
                f"digest:{name}", f"signed {signed[name]:016x}, arrived {arrived.sums[name]:016x}"
            )


def _check_span(part: str, kind: str, span: Span, producer: Endpoint, unit: int) -> None:
    if span.pool != POOLS.get(kind):
        raise HandoffRefused(part, f"it lies in pool `{span.pool}`, not `{POOLS.get(kind)}`")
    try:
        pool_of(producer.pools, span, producer.id)
    except TransferError as error:
        raise HandoffRefused(part, str(error)) from None
    if span.offset % unit or span.size % unit:
        raise HandoffRefused(part, f"{span.offset}+{span.size} cuts through a unit of {unit} bytes")


def _same(part: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise HandoffRefused(part, f"the ticket says {got!r}, this room expects {wanted!r}")
