"""Taking in a hand-off: check the ticket, READ, verify, compile its grammar; in a transfer thread.

Nothing here touches the engine's state: the destination is the request's own slots and pages, and
what became of the READ is told through `read_ended`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.contract.messages import DecodeJob
from common.contract.prefixes import token_hash
from common.contract.regions import Span
from common.errors import HandoffRefused, ServingError
from common.grammar.shelf import GrammarShelf
from common.observe.metrics import Tally
from common.ops.digest import Signature
from common.runtime.identity import Identity
from common.runtime.landing import Landing
from common.runtime.memory import TextMemory
from common.runtime.text_room import Claim
from common.transfer.link import Source, at_rank
from common.transfer.receiver import Receiver
from common.transfer.slices import HeadMemory, reads_of
from common.transfer.verify import Extent, spans_of
from services.decode.held import Held

Tamper = Callable[[Held, TextMemory], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds a hand-off spent."""

    wait_s: float
    pull_s: float
    verify_s: float

    def tell(self, tally: Tally) -> None:
        """Count the wait; the receiver counts READs and digests itself."""
        tally.observe("baton_decode_wait_seconds", self.wait_s)


class Intake:
    """The receiving half of the decode room."""

    def __init__(
        self,
        memory: TextMemory,
        receiver: Receiver,
        identity: Identity,
        grammars: GrammarShelf,
        *,
        whole: Mapping[str, HeadMemory],
        deadline_s: float,
        claim: Claim,
        tamper: Tamper | None = None,
    ) -> None:
        """`whole` is the memory of a slot over all ranks; `claim` renews a ticket at its owner;
        `tamper` changes bytes that arrived before they are digested, only with [testing].
        """
        self._whole = whole
        self._memory, self._receiver, self._identity = memory, receiver, identity
        self._grammars = grammars
        self._deadline_s, self._claim, self.tamper = deadline_s, claim, tamper
        self.readers = 1  # ranks that READ a hand-off, each of which ends for itself

    def take(
        self, held: Held, job: DecodeJob, posted: float, read_ended: Callable[[], None]
    ) -> Times:
        """Fill and verify the request's memory; `read_ended` is called once for each of
        the `readers`.

        Raises:
            HandoffRefused: naming the part.
            TransferError, DeadlineExceeded, Cancelled: the READ did not complete.
        """
        started = time.monotonic()
        try:
            reads = self._checked(held, job)
        except ServingError:
            for _ in range(self.readers):
                read_ended()
            raise
        measure = self._read(held, reads, min(self._deadline_s, job.deadline_s), read_ended)
        pulled = time.monotonic()
        self._receiver.verify(job.ticket.seal.digests, measure)
        if job.sampling.grammar is not None:
            held.matcher = self._grammars.matcher(job.sampling.grammar)
        now = time.monotonic()
        return Times(wait_s=started - posted, pull_s=pulled - started, verify_s=now - pulled)

    def _checked(self, held: Held, job: DecodeJob) -> list[list[Source]]:
        """Check the ticket; what each reader READs, of which ranks of the producer."""
        ranks = job.ticket.offer.ranks
        if not ranks or any(kind.heads % len(ranks) for kind in self._whole.values()):
            raise HandoffRefused("ranks", f"{len(ranks)} ranks do not divide the model's heads")
        local, remote = self._check(held, job), spans_of(job.ticket)
        return [
            [
                (at_rank(job.producer, ranks[source]), pairs)
                for source, pairs in reads_of(
                    self._whole,
                    local,
                    remote,
                    sources=len(ranks),
                    targets=self.readers,
                    target=reader,
                ).items()
            ]
            for reader in range(self.readers)
        ]

    def _read(
        self,
        held: Held,
        reads: list[list[Source]],
        deadline_s: float,
        read_ended: Callable[[], None],
    ) -> Callable[[], Signature]:
        """READ everything, each piece digested while the next ones travel.

        Args:
            held: whose.
            reads: what each reader READs.
            deadline_s: seconds this may take.
            read_ended: called once for each reader.

        Returns:
            What says what arrived; it waits for the digests.
        """
        landing = Landing(self._memory, held.prompt_place)

        def landed(number: int) -> None:
            if self.tamper is not None:
                self.tamper(held, self._memory)
            landing.landed(number)

        self._receiver.fetch_all(
            landing.pieces(reads[0]),
            deadline_s,
            lambda: held.stage != "fetching",
            read_ended,
            landed,
            landing.prepare,
        )
        return landing.signature

    def _check(self, held: Held, job: DecodeJob) -> dict[str, list[Span]]:
        """Renew and check the ticket, canary included; this rank's own spans by kind."""
        states, latents = self._memory.states, self._memory.latents
        expected = {  # on each of the producer's ranks
            kind: Extent(unit=memory.slot_bytes(len(job.ticket.offer.ranks)), count=1)
            for kind, memory in self._whole.items()
        }
        expected["latent"] = Extent(unit=latents.page_bytes, count=len(held.prompt_pages))
        left_s = self._claim(job.producer, job.ticket.offer, lambda: held.stage != "fetching")
        if len(job.token_ids) != held.reserve.prompt_tokens:
            raise HandoffRefused(
                "token_count",
                f"{held.reserve.prompt_tokens} tokens were reserved, {len(job.token_ids)} came",
            )
        local = {kind: [span] for kind, span in states.span(held.slots[0]).items()}
        local["latent"] = list(latents.spans(held.prompt_pages))
        if held.canary_slot >= 0:
            for kind, span in states.span(held.canary_slot).items():
                expected[f"canary_{kind}"] = expected[kind]
                local[f"canary_{kind}"] = [span]
        self._receiver.check(
            job.ticket,
            job.producer,
            model_print=self._identity.model_print,
            layout_print=self._identity.layout_print,
            num_tokens=len(job.token_ids),
            token_hash=token_hash(job.token_ids),
            expected=expected,
            lease_left_s=left_s,
        )
        return local
