"""Where a request's memory lies, kind by kind: what tickets name, READs fill and digests cover.

A stretch is one kind of it: units (layers of a slot, or pages) that follow each other on the wire
and may be moved and digested some at a time. Pure arithmetic on the pools' shapes; nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from common.cache.kda_pool import StatePool
from common.cache.mla_pool import LatentPool
from common.contract.regions import Span
from common.ops.digest import Rows

Cut = tuple[int, int, int]  # number of the stretch, first unit, unit behind the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The slots and pages of one request in a room's pools."""

    slot: int
    pages: tuple[int, ...]
    tokens: int  # that slot and pages stand for
    canary_slot: int = -1  # the state before the last token; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One kind of a request's memory."""

    kind: str  # as a ticket spells it
    names: tuple[str, ...]  # of its digests, by layer
    count: int  # units
    unit_bytes: int
    spans: Callable[[int, int], Sequence[Span]]  # of the units from one to before another
    rows: Callable[[int, int, int], list[Rows]]  # the same, and where its first name stands


def stretches_of(states: StatePool, latents: LatentPool, place: Place) -> list[Stretch]:
    """All kinds of a request's memory, in the order in which their names are summed."""
    found = _slot(states, place.slot, "")
    found.append(
        Stretch(
            kind="latent",
            names=latents.names,
            count=len(place.pages),
            unit_bytes=latents.page_bytes,
            spans=lambda low, high: latents.spans(place.pages[low:high]),
            rows=lambda low, high, at: latents.rows(place.pages, place.tokens, at, low, high),
        )
    )
    return found if place.canary_slot < 0 else found + _slot(states, place.canary_slot, "canary_")


def cut(
    stretches: Sequence[Stretch], piece_bytes: int, ranges: Sequence[Cut] | None = None
) -> list[list[Cut]]:
    """Cut stretches, or ranges of them, in order, into pieces of `piece_bytes` or of one unit."""
    pieces: list[list[Cut]] = []
    room = 0
    for number, low, end in ranges if ranges is not None else whole(stretches):
        stretch = stretches[number]
        while low < end:
            fits = room // stretch.unit_bytes
            if fits < 1:
                pieces.append([])
                room, fits = piece_bytes, max(1, piece_bytes // stretch.unit_bytes)
            high = min(end, low + fits)
            pieces[-1].append((number, low, high))
            room -= (high - low) * stretch.unit_bytes
            low = high
    return pieces


def whole(stretches: Sequence[Stretch]) -> list[Cut]:
    """All of them."""
    return [(number, 0, stretch.count) for number, stretch in enumerate(stretches)]


def portions(
    stretches: Sequence[Stretch], final_pages: int, borders: Sequence[int]
) -> list[list[Cut]]:
    """What becomes final with each portion of an offer (`Offer`), in order.

    Raises:
        ValueError: the borders do not ascend to the slot's last layer, or more pages are final
            than there are.
    """
    layers = next((stretch.count for stretch in stretches if stretch.kind == "state"), 0)
    pages = next(stretch.count for stretch in stretches if stretch.kind == "latent")
    steps = list(pairwise([0, *borders]))
    if borders[-1:] != (layers,) or any(low >= high for low, high in steps):
        raise ValueError(f"borders {list(borders)} do not ascend to layer {layers}")
    if not 0 <= final_pages <= pages:
        raise ValueError(f"{final_pages} of {pages} pages are said to be final")
    found: list[list[Cut]] = [[] for _ in range(len(borders) + 2)]
    for number, stretch in enumerate(stretches):
        if stretch.kind == "latent":
            found[0].append((number, 0, final_pages))
            found[-1].append((number, final_pages, pages))
        elif stretch.kind.startswith("canary_"):
            found[0].append((number, 0, stretch.count))
        else:
            for portion, (low, high) in enumerate(steps, 1):
                found[portion].append((number, low, high))
    return found


def _slot(states: StatePool, slot: int, prefix: str) -> list[Stretch]:
    layers = len(states.layers)
    return [
        Stretch(
            kind=f"{prefix}{kind}",
            names=states.names(kind, prefix),
            count=layers,
            unit_bytes=size // layers,
            spans=partial(_layers, states.span(slot)[kind], size // layers),
            rows=partial(states.rows, kind, slot),
        )
        for kind, size in (("state", states.state_bytes), ("conv", states.conv_bytes))
        if layers
    ]


def _layers(slot: Span, layer_bytes: int, low: int, high: int) -> list[Span]:
    size = (high - low) * layer_bytes
    return [Span(pool=slot.pool, offset=slot.offset + low * layer_bytes, size=size)]
