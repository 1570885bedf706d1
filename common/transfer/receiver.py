"""Receiver: takes tickets, READs what they name, proves it, and keeps late READs away from others.

A destination belongs to its READ until that ended. When a request gives up first, its destination
goes into quarantine, and only `sweep` lets it out. Blocking: it runs in transfer threads, never on
an event loop. It owns no memory: whoever does hands in `on_free` and waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from common.contract.messages import CacheTicket, EmbedTicket, Endpoint
from common.contract.protocol import RULES, Rules
from common.errors import Cancelled, DeadlineExceeded, HandoffRefused, TransferError
from common.ops.digest import Signature
from common.transfer.link import Link, Pair, Read
from common.transfer.verify import (
    Extent,
    check_images,
    check_origin,
    check_spans,
    check_tokens,
    match,
    spans_of,
)

_NONCES_KEPT_S = 20 * RULES.lease_s  # an owner has long forgotten such a ticket
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 2e-3


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
        self._used: dict[bytes, float] = {}
        self._quarantine: list[tuple[Read, Callable[[], None]]] = []

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
        """Accept a cache ticket once, or refuse it, before any byte moves.

        Args:
            ticket: as it came.
            producer: the endpoint registered for it.
            model_print: this room's.
            layout_print: this room's.
            num_tokens: tokens the state must stand for.
            token_hash: their hash.
            expected: bytes each kind must cover.
            lease_left_s: what the owner's last renewal leaves; None: the ticket came this moment.

        Raises:
            HandoffRefused: naming the part.
        """
        self._check_origin(
            ticket, producer, model_print, layout_print, lease_left_s, ticket.offer.lease_s
        )
        self._consume(ticket.offer.nonce)
        check_tokens(ticket, num_tokens=num_tokens, token_hash=token_hash)
        check_spans(spans_of(ticket), producer, expected)

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
        self._check_origin(
            ticket, producer, model_print, layout_print, lease_left_s, ticket.lease_s
        )
        self._consume(ticket.nonce)
        check_images(ticket, producer, images, row_bytes)

    def fetch(
        self,
        peer: Endpoint,
        pairs: Sequence[Pair],
        deadline_s: float,
        cancelled: Callable[[], bool],
        on_free: Callable[[], None],
    ) -> None:
        """READ all pairs (local, remote) and return when every byte is here.

        Args:
            peer: whose memory.
            pairs: local and remote spans of equal size.
            deadline_s: seconds this may take.
            cancelled: asked while waiting.
            on_free: called exactly once, when nobody writes into the local spans any more. That is
                before this returns or raises, unless a deadline or a cancel met a READ in progress:
                then `sweep` calls it.

        Raises:
            TransferError: the READ was refused or failed.
            DeadlineExceeded, Cancelled: given up; the destination may be in quarantine.
        """
        until = self._clock() + deadline_s
        try:
            self._link.connect(peer)
            read = self._link.read(peer, pairs)
        except TransferError:
            on_free()
            raise
        pause = _FIRST_PAUSE_S
        while not self._ended(read, on_free):
            late = self._clock() >= until
            if late or cancelled():
                with self._lock:
                    self._quarantine.append((read, on_free))
                if late:
                    raise DeadlineExceeded(
                        f"a READ from {peer.id} took longer than {deadline_s:.1f} s"
                    )
                raise Cancelled(f"cancelled while reading from {peer.id}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

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
        with self._sweeping:  # an entry stays counted until its READ ended, and is freed once
            with self._lock:
                waiting = list(self._quarantine)
            for entry in waiting:
                try:
                    ended = self._ended(*entry)
                except TransferError:
                    ended = True
                if ended:
                    out += 1
                    with self._lock:
                        self._quarantine.remove(entry)
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

    def _ended(self, read: Read, on_free: Callable[[], None]) -> bool:
        """Poll once; frees the destination when the READ ended, and raises when it failed."""
        try:
            if not read.poll():
                return False
        except TransferError:
            read.release()
            on_free()
            raise
        read.release()
        on_free()
        return True

    def _check_origin(
        self,
        ticket: EmbedTicket | CacheTicket,
        producer: Endpoint,
        model_print: str,
        layout_print: str,
        lease_left_s: float | None,
        lease_s: float,
    ) -> None:
        check_origin(
            ticket,
            producer,
            model_print=model_print,
            layout_print=layout_print,
            lease_left_s=lease_s if lease_left_s is None else lease_left_s,
            read_floor_s=self._rules.read_floor_s,
        )

    def _consume(self, nonce: bytes) -> None:
        now = self._clock()
        with self._lock:
            while self._used and next(iter(self._used.values())) < now - _NONCES_KEPT_S:
                del self._used[next(iter(self._used))]
            if nonce in self._used:
                raise HandoffRefused("nonce", f"ticket {nonce.hex()} was used before")
            self._used[nonce] = now
