"""Receiver: takes tickets, READs what they name, proves it, and keeps late READs away from others.

A destination belongs to its READ until that ended. When a request gives up first, its destination
goes into quarantine, and only `sweep` lets it out. Blocking: it runs in transfer threads, never on
an event loop. It owns no memory: whoever does hands in `on_free` and waits for it.

Longer than 300 lines because every change of a destination's state stands here, behind one lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from common.contract.messages import CacheTicket, EmbedTicket, Endpoint, Offer
from common.contract.protocol import RULES, Event, Rules, State, may_read, step
from common.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoffRefused,
    ServingError,
    TransferError,
)
from common.ops.digest import Signature
from common.transfer.gate import Gate
from common.transfer.link import Link, Pair, Source, Together, at_rank
from common.transfer.pieces import PiecedRead
from common.transfer.verify import (
    Extent,
    check_images,
    check_origin,
    check_ranks,
    check_spans,
    check_tokens,
    match,
    spans_of,
)

_NONCES_KEPT_S = 20 * RULES.lease_s  # an owner has long forgotten such a ticket
# A sleep takes 0.07 ms and more however short it is meant to be: too late for a READ on one host.
_AWAKE_S = 2e-3
_PAUSE_SHARE = 1 / 32  # of the time a READ has taken: how late its end may be noticed
_LONGEST_PAUSE_S = 2e-3
_KEPT_BACK_S = 0.1  # how soon a READ that waits for its owner notices a cancel
_OBJECTIONS = {
    "epoch": "its producer was started anew since it was made",
    "nonce": "it was taken before",
}


@dataclass(slots=True)
class _Destination:
    """Memory that a READ writes into; `state` is one of the protocol's table of destinations."""

    state: State
    read: PiecedRead
    on_free: Callable[[], None]


class Receiver:
    """One room's receiving end."""

    def __init__(
        self,
        link: Link,
        *,
        quarantine_bound: int,
        clock: Callable[[], float] = time.monotonic,
        tamper: Callable[[str], None] | None = None,
        verifying: bool = True,
        rules: Rules = RULES,
    ) -> None:
        """Start with an empty quarantine.

        Args:
            link: where READs are posted.
            quarantine_bound: destinations in quarantine at which the rank must restart.
            clock: monotonic seconds.
            tamper: called with "arrived" between DONE and verification; only with [testing].
            verifying: False skips the comparison with the seal; only with [testing].
            rules: the protocol's tables and times.
        """
        self._link, self._bound, self._clock, self._rules = link, quarantine_bound, clock, rules
        self._tamper, self._verifying = tamper, verifying
        self._lock, self._sweeping = threading.Lock(), threading.Lock()
        self._taken: dict[bytes, float] = {}  # nonce -> when, oldest first
        self._epochs: dict[str, int] = {}  # producer -> the latest epoch met
        self._quarantine: list[_Destination] = []

    def check(
        self,
        ticket: CacheTicket,
        producer: Endpoint,
        *,
        model_print: str,
        layout_print: str,
        num_tokens: int,
        token_hash: bytes,
        expected: Mapping[str, Extent],
        lease_left_s: float | None = None,
    ) -> None:
        """Take a cache ticket, once, or refuse it, before any byte moves.

        Args:
            ticket: as it came.
            producer: the endpoint registered for it.
            model_print: this room's.
            layout_print: this room's.
            num_tokens: tokens the state must stand for.
            token_hash: their hash.
            expected: bytes each kind must cover on each of the ticket's ranks.
            lease_left_s: what the owner's last renewal leaves; None: the ticket came this moment.

        Raises:
            HandoffRefused: naming the part. For "nonce" and "epoch" the ticket is not this job's to
                release; for any other part the owner is told "refused".
        """
        check_origin(ticket, producer, model_print=model_print, layout_print=layout_print)
        offer = ticket.offer
        self._take(offer.nonce, offer.epoch, producer)
        self._check_lease(offer.lease_s if lease_left_s is None else lease_left_s)
        check_tokens(ticket, num_tokens=num_tokens, token_hash=token_hash)
        check_ranks(offer, producer)
        for rank in offer.ranks:
            check_spans(spans_of(offer), at_rank(producer, rank), expected)

    def check_offer(
        self,
        offer: Offer,
        producer: Endpoint,
        *,
        model_print: str,
        layout_print: str,
        expected: Mapping[str, Extent],
    ) -> None:
        """Take the ticket of an offer whose seal is still to come; as `check`, without tokens."""
        check_origin(offer, producer, model_print=model_print, layout_print=layout_print)
        self._take(offer.nonce, offer.epoch, producer)
        check_ranks(offer, producer)
        for rank in offer.ranks:
            check_spans(spans_of(offer), at_rank(producer, rank), expected)

    def check_embeds(
        self,
        ticket: EmbedTicket,
        producer: Endpoint,
        *,
        model_print: str,
        layout_print: str,
        images: Sequence[tuple[bytes, int]],
        row_bytes: int,
        lease_left_s: float | None = None,
    ) -> None:
        """The same for embeddings; `images` are (content hash, tokens) in the prompt's order."""
        check_origin(ticket, producer, model_print=model_print, layout_print=layout_print)
        self._take(ticket.nonce, ticket.epoch, producer)
        self._check_lease(ticket.lease_s if lease_left_s is None else lease_left_s)
        check_images(ticket, producer, images, row_bytes)

    def fetch(
        self,
        peer: Endpoint,
        pairs: Sequence[Pair],
        deadline_s: float,
        cancelled: Callable[[], bool],
        on_free: Callable[[], None],
    ) -> None:
        """READ all pairs of one peer; see `fetch_all`."""
        self.fetch_all([[(peer, pairs)]], deadline_s, cancelled, on_free)

    def fetch_all(
        self,
        pieces: Sequence[Sequence[Source]],
        deadline_s: float,
        cancelled: Callable[[], bool],
        on_free: Callable[[], None],
        landed: Callable[[int], None] | None = None,
        posted: Callable[[], None] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """READ all pairs (local, remote) of all peers and return when every byte is here.

        Args:
            pieces: in which the READ travels: of each the peers, and for each of these the local
                and remote spans of equal size.
            deadline_s: seconds this may take.
            cancelled: asked while waiting.
            on_free: called exactly once, when nobody writes into the local spans any more. That is
                before this returns or raises, unless a deadline or a cancel met a READ in progress:
                then `sweep` calls it.
            landed: called with the number of a piece when its bytes are here, while others travel;
                its errors end the READ. Nothing may be used yet.
            posted: called when the READ was posted; its errors end the READ too.
            gate: keeps back pieces that are not final, and its errors end the READ. Time that is
                spent waiting for it is not the READ's.

        Raises:
            TransferError: the READ was refused or failed.
            DeadlineExceeded, Cancelled: given up; the destination may be in quarantine.
        """
        until = self._clock() + deadline_s
        try:
            read = PiecedRead(
                lambda piece: Together().post(self._link, piece), pieces, landed, posted, gate
            )
        except ServingError:
            on_free()
            raise
        destination = _Destination(self._after(State.HELD, Event.POST), read, on_free)
        named = ", ".join(sorted({peer.id for piece in pieces for peer, _ in piece}))
        while not self._ends(destination):
            left_s = until - self._clock()
            late = left_s <= 0
            if late or cancelled():
                self._give_up(destination)
                if late:
                    raise DeadlineExceeded(f"a READ from {named} took over {deadline_s:.1f} s")
                raise Cancelled(f"cancelled while reading from {named}")
            if gate is not None and (number := read.kept_back) is not None:
                gate.wait(number, _KEPT_BACK_S)
                until = self._clock() + deadline_s
                continue
            taken_s = deadline_s - left_s
            if taken_s > _AWAKE_S:
                time.sleep(min(taken_s * _PAUSE_SHARE, _LONGEST_PAUSE_S))

    def verify(self, signed: Mapping[str, int], measure: Callable[[], Signature]) -> None:
        """Measure what arrived and compare it with what was signed.

        Args:
            signed: digests of the seal, or of the embed parts by image index ("embed:<index>").
            measure: digests the destination as it is now.

        Raises:
            HandoffRefused: finite:<kind> or digest:<kind>:<layer>.
        """
        if self._tamper is not None:
            self._tamper("arrived")
        if self._verifying:
            match(signed, measure())

    def sweep(self) -> int:
        """Let destinations whose READ ended out of quarantine; returns how many."""
        out = 0
        with self._sweeping:  # a destination stays counted until its READ ended, and is freed once
            with self._lock:
                waiting = list(self._quarantine)
            for destination in waiting:
                with suppress(TransferError):  # the request that wanted it is long gone
                    self._ends(destination)
                if destination.state is State.FREE:
                    out += 1
                    with self._lock:
                        self._quarantine.remove(destination)
        return out

    @property
    def quarantined(self) -> int:
        """Destinations in quarantine."""
        with self._lock:
            return len(self._quarantine)

    @property
    def must_restart(self) -> bool:
        """Whether the quarantine has reached its bound: only the end of this process frees it."""
        return self.quarantined >= self._bound

    def _give_up(self, destination: _Destination) -> None:
        """Post no more; what is in progress keeps its destination in quarantine."""
        destination.read.give_up()
        if not destination.read.is_in_progress:
            destination.state = self._after(destination.state, Event.FAIL)
            destination.on_free()
            return
        destination.state = self._after(destination.state, Event.ABANDON)
        with self._lock:
            self._quarantine.append(destination)

    def _ends(self, destination: _Destination) -> bool:
        """Poll once: whether the READ is done. Its end, good or bad, is noted and told.

        Raises:
            TransferError: it failed; or what `landed` raised.
        """
        failure = None
        try:
            if not destination.read.poll():
                return False
        except Exception as error:  # raised further on: the destination is free all the same
            failure = error
        event = Event.DONE if failure is None else Event.FAIL
        destination.state = self._after(destination.state, event)
        destination.read.release()
        destination.on_free()
        if failure is not None:
            raise failure
        return True

    def _after(self, state: State, event: Event) -> State:
        after = step(self._rules.destination, state, event)
        assert after is not None, f"a destination that is {state} cannot {event}"
        return after

    def _check_lease(self, left_s: float) -> None:
        floor_s = self._rules.read_floor_s
        if not may_read(left_s, floor_s):
            sentence = f"{left_s:.1f} s are left, and a READ is posted with {floor_s:.0f} s or more"
            raise HandoffRefused("lease", sentence)

    def _take(self, nonce: bytes, epoch: int, producer: Endpoint) -> None:
        """Use the ticket up, whatever comes of it."""
        now = self._clock()
        with self._lock:
            while self._taken and next(iter(self._taken.values())) < now - _NONCES_KEPT_S:
                del self._taken[next(iter(self._taken))]
            known = max(self._epochs.get(producer.id, producer.epoch), producer.epoch)
            self._epochs[producer.id] = known
            part = self._rules.objection(
                ticket_epoch=epoch,
                producer_epoch=producer.epoch,
                known_epoch=known,
                is_used=nonce in self._taken,
            )
            if part:
                raise HandoffRefused(part, f"ticket {nonce.hex()}: {_OBJECTIONS[part]}")
            self._taken[nonce] = now
