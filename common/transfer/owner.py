"""Owner: the memory this room lets others read, ticket by ticket, each under a lease.

Moves records by `common.contract.protocol` and calls back when a ticket ends, so that the room
can free what it covered. It never touches memory and never sends a message. Safe to call from any
thread; callbacks run on the calling thread, outside the lock.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.contract.messages import CacheTicket, EmbedPart, EmbedTicket, Offer, Part, Seal
from common.contract.protocol import ENDED, ENDINGS, RULES, Event, Leased, Rules, State, lease, move
from common.errors import HandoffRefused

OnEnd = Callable[[str], None]  # called once with the outcome: released, refused, expired or aborted


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """How the memory of an offer becomes final after it left; see `Offer`."""

    final_pages: int
    borders: tuple[int, ...]
    final: Callable[[], int]  # how many portions are, from any thread


@dataclass(slots=True)
class _Ticket:
    record: Leased
    request: str
    probe: bool
    on_end: OnEnd
    offer: Offer | None  # None: embeddings
    final: Callable[[], int] | None = None  # how many portions of an offer are, before its seal


class Owner:
    """All tickets a replica has given out in this epoch."""

    def __init__(
        self,
        producer_id: str,
        epoch: int,
        model_print: str,
        layout_print: str,
        *,
        lease_s: float = RULES.lease_s,
        clock: Callable[[], float] = time.monotonic,
        rules: Rules = RULES,
    ) -> None:
        """Start without tickets; `lease_s` is how long one lives without a renewal."""
        self.producer_id, self.epoch = producer_id, epoch
        self.model_print, self.layout_print = model_print, layout_print
        self.lease_s = lease_s
        self._clock = clock
        self._table = rules.owner
        self._tickets: dict[bytes, _Ticket] = {}
        self._lock = threading.Lock()

    def offer(
        self,
        request: str,
        parts: Sequence[Part],
        on_end: OnEnd,
        probe: bool = False,
        ranks: tuple[int, ...] = (0,),
        early: Early | None = None,
    ) -> Offer:
        """Give out the first half of a cache ticket: where a request's memory lies.

        `early`: how the memory becomes final, where that is still to come.
        """
        offer = Offer(
            nonce=secrets.token_bytes(16),
            producer=self.producer_id,
            epoch=self.epoch,
            model_print=self.model_print,
            layout_print=self.layout_print,
            parts=tuple(parts),
            lease_s=self.lease_s,
            ranks=ranks,
            final_pages=early.final_pages if early else 0,
            borders=early.borders if early else (),
        )
        final = early.final if early else None
        self._add(offer.nonce, State.OFFERED, request, probe, on_end, offer, final)
        return offer

    def seal(self, nonce: bytes, seal: Seal) -> CacheTicket:
        """Give out the second half: what the memory holds. The lease starts anew.

        Raises:
            HandoffRefused: "lease" when the ticket has ended, "nonce" when it was sealed before.
        """
        with self._lock:
            ticket = self._tickets.get(nonce)
        if ticket is None or ticket.offer is None or self._move(nonce, Event.RENEW) is None:
            raise HandoffRefused("lease", f"ticket {nonce.hex()} ended before it was sealed")
        if self._move(nonce, Event.SEAL) is not State.SEALED:
            raise HandoffRefused("nonce", f"ticket {nonce.hex()} is sealed already")
        return CacheTicket(offer=ticket.offer, seal=seal)

    def offer_embeds(
        self, request: str, parts: Sequence[EmbedPart], on_end: OnEnd, probe: bool = False
    ) -> EmbedTicket:
        """Give out a ticket for embeddings, which are complete and signed when it is made."""
        ticket = EmbedTicket(
            nonce=secrets.token_bytes(16),
            producer=self.producer_id,
            epoch=self.epoch,
            model_print=self.model_print,
            layout_print=self.layout_print,
            parts=tuple(parts),
            lease_s=self.lease_s,
        )
        self._add(ticket.nonce, State.SEALED, request, probe, on_end, None)
        return ticket

    def renew(self, nonces: Iterable[bytes]) -> tuple[bytes, ...]:
        """Start the leases of these tickets anew; returns the nonces that are no longer held."""
        return tuple(
            nonce
            for nonce in nonces
            if self._move(nonce, Event.RENEW) not in (State.OFFERED, State.SEALED)
        )

    def final(self, nonce: bytes) -> int:
        """Start an offer's lease anew; returns how many of its portions are final.

        Raises:
            HandoffRefused: part "lease": the ticket ended.
        """
        state = self._move(nonce, Event.RENEW)
        with self._lock:
            ticket = self._tickets.get(nonce)
        if state is None or ticket is None or ticket.offer is None:
            raise HandoffRefused("lease", f"ticket {nonce.hex()} ended")
        if state is State.OFFERED and ticket.final is not None:
            return ticket.final()
        return ticket.offer.portions if state is State.SEALED else 0

    def release(self, nonce: bytes, outcome: str) -> bool:
        """End a ticket; False when it had ended before or is not ours, which is no error.

        Raises:
            ValueError: `outcome` is none of released, refused, expired, aborted.
        """
        if outcome not in ENDINGS:
            raise ValueError(f"`{outcome}` is no outcome; use one of {', '.join(ENDINGS)}")
        event = ENDINGS[outcome]
        # A receiver's clock cannot expire a lease; one that gave up on it has refused it.
        return self._move(nonce, Event.REFUSE if event is Event.EXPIRE else event) in ENDED

    def abort(self, request: str) -> int:
        """End all tickets of a request; returns how many there were."""
        with self._lock:
            nonces = [nonce for nonce, ticket in self._tickets.items() if ticket.request == request]
        return sum(self.release(nonce, "aborted") for nonce in nonces)

    def sweep(self) -> int:
        """End every ticket whose lease ran out; returns how many."""
        with self._lock:
            nonces = list(self._tickets)
        return sum(self._move(nonce, Event.EXPIRE) is State.EXPIRED for nonce in nonces)

    def held(self) -> int:
        """Tickets that have not ended, without those of probes."""
        with self._lock:
            return sum(not ticket.probe for ticket in self._tickets.values())

    def _add(
        self,
        nonce: bytes,
        state: State,
        request: str,
        probe: bool,
        on_end: OnEnd,
        offer: Offer | None,
        final: Callable[[], int] | None = None,
    ) -> None:
        record = lease(state, self._clock(), self.lease_s)
        with self._lock:
            self._tickets[nonce] = _Ticket(record, request, probe, on_end, offer, final)

    def _move(self, nonce: bytes, event: Event) -> State | None:
        """Apply one event: the new state, or None when nothing changed. Forgets ended tickets."""
        with self._lock:
            ticket = self._tickets.get(nonce)
            if ticket is None:
                return None
            record = move(self._table, ticket.record, event, self._clock(), self.lease_s)
            if record is None:
                return None
            ticket.record = record
            if record.state in ENDED:
                del self._tickets[nonce]
        if record.state in ENDED:
            ticket.on_end(record.state.value)
        return record.state
