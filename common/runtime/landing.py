"""Landing: a request's memory while a READ fills it, piece by piece, and its digests as they land.

A piece is digested as soon as it is here, on a stream of its own, while the next ones are on their
way; the sums of the pieces are those of the whole. All that a digest needs is made ready while the
first piece travels, so that a piece costs one launch. What they add up to is read once, at the end,
and nothing may be used before it was compared with the seal.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from common.contract.messages import Offer
from common.contract.regions import Span
from common.ops.digest import Signature, Summing
from common.runtime.memory import TextMemory
from common.runtime.place import Place, cut, portions, whole
from common.transfer.link import Pair, Source, part_of

PIECE_BYTES = 512 << 20  # less, and looking after them takes the host longer than they travel


class Landing:
    """One request's destination."""

    def __init__(
        self,
        memory: TextMemory,
        place: Place,
        *,
        piece_bytes: int = PIECE_BYTES,
        offer: Offer | None = None,
    ) -> None:
        """Plan the pieces and start with nothing digested.

        Args:
            memory: where the destination lies.
            place: the destination.
            piece_bytes: most bytes of a piece.
            offer: whose portions no piece may cross; None: there are none.

        Raises:
            ValueError: the offer's portions are none of this place.
        """
        self._memory, self._place = memory, place
        self._stretches = memory.stretches(place)
        parts = [whole(self._stretches)]
        if offer is not None and offer.borders:
            parts = portions(self._stretches, offer.final_pages, offer.borders)
        pieces = [cut(self._stretches, piece_bytes, part) for part in parts]
        self._cuts = [piece for some in pieces for piece in some]
        self.portion_of = [number for number, some in enumerate(pieces) for _ in some]
        device = memory.latents.pages.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._summing: Summing | None = None  # made by `prepare`
        self._adds: list[Callable[[], None]] = []

    def pieces(self, sources: Sequence[Source]) -> list[list[Source]]:
        """Cut what is READ of each peer at the borders of the pieces.

        Args:
            sources: peers, and pairs that together cover the destination.
        """
        borders = sorted(
            (span.pool, span.offset, span.offset + span.size, number)
            for number, cuts in enumerate(self._cuts)
            for which, low, high in cuts
            for span in self._stretches[which].spans(low, high)
        )
        found: list[list[Source]] = [[] for _ in self._cuts]
        for peer, pairs in sources:
            by_piece: dict[int, list[Pair]] = {}
            for local, remote in pairs:
                for number, at, size in _crossed(borders, local):
                    pair = (part_of(local, at, size), part_of(remote, at, size))
                    by_piece.setdefault(number, []).append(pair)
            for number, own in by_piece.items():
                found[number].append((peer, own))
        return found

    def prepare(self) -> None:
        """Make every piece's digest ready; best while the first one travels."""
        self._sums()

    def landed(self, number: int) -> None:
        """Digest a piece that has arrived; on a device this returns before it is."""
        self._sums()
        self._adds[number]()  # on the stream beside, where it was prepared

    def signature(self) -> Signature:
        """Clear what lies behind the last token, and say what all pieces add up to."""
        summing = self._sums()
        with self._beside():
            self._memory.latents.zero_rest(self._place.pages, self._place.tokens)
            return summing.signature()

    def _sums(self) -> Summing:
        if self._summing is None:
            at = list(accumulate((len(stretch.names) for stretch in self._stretches), initial=0))
            pieces = [
                [
                    row
                    for which, low, high in cuts
                    for row in self._stretches[which].rows(low, high, at[which])
                ]
                for cuts in self._cuts
            ]
            with self._beside():
                self._summing = self._memory.summing(self._stretches)
                self._adds = self._summing.plan(pieces)
        return self._summing

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch beside the engine's stream; the host waits in `signature` alone."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def _crossed(
    borders: Sequence[tuple[str, int, int, int]], span: Span
) -> Iterator[tuple[int, int, int]]:
    """The pieces that a span runs through: number, offset within the span, size.

    Args:
        borders: (pool, start, end, number of the piece), ascending.
        span: of the destination.
    """
    at, end = span.offset, span.offset + span.size
    index = bisect_right(borders, (span.pool, at, sys.maxsize, 0)) - 1
    while at < end:
        pool, first, last, number = borders[index] if 0 <= index < len(borders) else ("", 0, 0, 0)
        inside = pool == span.pool and first <= at < last
        assert inside, f"byte {at} of pool `{span.pool}` lies outside the destination"
        size = min(end, last) - at
        yield number, at - span.offset, size
        at, index = at + size, index + 1
