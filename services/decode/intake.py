"""Taking in a hand-off: check the ticket, READ, verify, compile its grammar; in a transfer thread.

An offer may be pulled before its seal: then the job that brings the seal waits for that READ and
verifies it. Nothing here touches the engine's state: the destination is the request's own slots and
pages, and what became of the READ is told through `read_ended`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from common.contract.messages import DecodeJob, Offer
from common.contract.prefixes import token_hash
from common.contract.regions import Span
from common.errors import HandoffRefused, ServingError
from common.grammar.shelf import GrammarShelf
from common.observe.metrics import Tally
from common.ops.digest import Signature
from common.runtime.identity import Identity
from common.runtime.landing import Landing
from common.runtime.memory import TextMemory
from common.runtime.place import Place
from common.runtime.text_room import Claim, Follow
from common.transfer.gate import Gate
from common.transfer.link import Source, at_rank
from common.transfer.receiver import Receiver
from common.transfer.slices import HeadMemory, reads_of
from common.transfer.verify import Extent, check_tokens, spans_of
from services.decode.held import Held, Pull

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
        follow: Follow,
        tamper: Tamper | None = None,
    ) -> None:
        """`whole` is the memory of a slot over all ranks; `claim` renews a ticket at its owner,
        `follow` hears from it what is final; `tamper` changes bytes that arrived before they are
        digested, only with [testing].
        """
        self._whole = whole
        self._memory, self._receiver, self._identity = memory, receiver, identity
        self._grammars = grammars
        self._deadline_s, self._claim, self.tamper = deadline_s, claim, tamper
        self._follow = follow
        self.readers = 1  # ranks that READ a hand-off, each of which ends for itself
        self.is_alone = True  # all memory is this process's

    def take(
        self, held: Held, job: DecodeJob, posted: float, read_ended: Callable[[], None]
    ) -> Times:
        """Fill and verify the request's memory; `read_ended` is called once for each of
        the `readers`, unless a pull fills it, which tells that itself.

        Raises:
            HandoffRefused: naming the part.
            TransferError, DeadlineExceeded, Cancelled: the READ did not complete.
        """
        started = time.monotonic()
        if held.pull is not None:
            measure = self._joined(held.pull, job)
        else:
            measure = self._whole_ticket(held, job, read_ended)
        pulled = time.monotonic()
        self._receiver.verify(job.ticket.seal.digests, measure)
        if job.sampling.grammar is not None:
            held.matcher = self._grammars.matcher(job.sampling.grammar)
        now = time.monotonic()
        return Times(wait_s=started - posted, pull_s=pulled - started, verify_s=now - pulled)

    def pull(
        self, held: Held, pull: Pull, read_ended: Callable[[], None]
    ) -> Callable[[], Signature]:
        """Fill the request's memory as its offer becomes final; `read_ended` is called once.

        Returns:
            What says what arrived; it waits for the digests.

        Raises:
            HandoffRefused: naming the part; "lease" also when its ticket ended meanwhile.
            TransferError, DeadlineExceeded, Cancelled, RoomLost: the READ did not complete.
        """
        job, place = pull.job, held.prompt_place
        try:
            local, expected = self._wanted(held, 1)
            self._receiver.check_offer(
                job.offer,
                job.producer,
                model_print=self._identity.model_print,
                layout_print=self._identity.layout_print,
                expected=expected,
            )
            landing = self._landing(job.offer, place)
            pairs = reads_of(
                self._whole, local, spans_of(job.offer), sources=1, targets=1, target=0
            )[0]
        except ServingError:
            read_ended()
            raise
        gate = Gate(landing.portion_of)
        sources = [(at_rank(job.producer, job.offer.ranks[0]), pairs)]
        with self._follow(job.producer, job.offer, gate, job.deadline_s):
            self._fetch(
                held,
                landing,
                sources,
                self._deadline_s,
                lambda: pull.is_given_up or held.stage == "ended",
                read_ended,
                gate,
            )
        return landing.signature

    def _joined(self, pull: Pull, job: DecodeJob) -> Callable[[], Signature]:
        """Check the seal of what is pulled, and wait for the rest of it."""
        try:
            if job.ticket.offer != pull.job.offer:
                raise HandoffRefused("nonce", "it was pulled as another offer")
            hashed = token_hash(job.token_ids)
            check_tokens(job.ticket, num_tokens=len(job.token_ids), token_hash=hashed)
        except HandoffRefused:
            pull.is_given_up = True
            wait([pull.arrived])
            raise
        return pull.arrived.result()

    def _landing(self, offer: Offer, place: Place) -> Landing:
        try:
            return Landing(self._memory, place, offer=offer)
        except ValueError as error:
            raise HandoffRefused("span:state", str(error)) from None

    def _whole_ticket(
        self, held: Held, job: DecodeJob, read_ended: Callable[[], None]
    ) -> Callable[[], Signature]:
        """Check a ticket and READ all of it."""
        try:
            reads = self._checked(held, job)
        except ServingError:
            for _ in range(self.readers):
                read_ended()
            raise
        return self._read(held, reads, min(self._deadline_s, job.deadline_s), read_ended)

    def _checked(self, held: Held, job: DecodeJob) -> list[list[Source]]:
        """Check the ticket; what each reader READs, of which ranks of the producer."""
        ranks = job.ticket.offer.ranks
        if not ranks or any(kind.heads % len(ranks) for kind in self._whole.values()):
            raise HandoffRefused("ranks", f"{len(ranks)} ranks do not divide the model's heads")
        local, remote = self._check(held, job), spans_of(job.ticket.offer)
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
        self._fetch(
            held, landing, reads[0], deadline_s, lambda: held.stage != "fetching", read_ended
        )
        return landing.signature

    def _fetch(
        self,
        held: Held,
        landing: Landing,
        sources: Sequence[Source],
        deadline_s: float,
        is_over: Callable[[], bool],
        read_ended: Callable[[], None],
        gate: Gate | None = None,
    ) -> None:
        def landed(number: int) -> None:
            if self.tamper is not None:
                self.tamper(held, self._memory)
            landing.landed(number)

        self._receiver.fetch_all(
            landing.pieces(sources),
            deadline_s,
            is_over,
            read_ended,
            landed,
            landing.prepare,
            gate,
        )

    def _wanted(self, held: Held, ranks: int) -> tuple[dict[str, list[Span]], dict[str, Extent]]:
        """This rank's own spans by kind, canary included, and what each of so many has of them."""
        states, latents = self._memory.states, self._memory.latents
        expected = {
            kind: Extent(unit=memory.slot_bytes(ranks), count=1)
            for kind, memory in self._whole.items()
        }
        expected["latent"] = Extent(unit=latents.page_bytes, count=len(held.prompt_pages))
        local = {kind: [span] for kind, span in states.span(held.slots[0]).items()}
        local["latent"] = list(latents.spans(held.prompt_pages))
        if held.canary_slot >= 0:
            for kind, span in states.span(held.canary_slot).items():
                expected[f"canary_{kind}"] = expected[kind]
                local[f"canary_{kind}"] = [span]
        return local, expected

    def _check(self, held: Held, job: DecodeJob) -> dict[str, list[Span]]:
        """Renew and check the ticket; this rank's own spans by kind."""
        local, expected = self._wanted(held, len(job.ticket.offer.ranks))
        left_s = self._claim(job.producer, job.ticket.offer, lambda: held.stage != "fetching")
        if len(job.token_ids) != held.reserve.prompt_tokens:
            raise HandoffRefused(
                "token_count",
                f"{held.reserve.prompt_tokens} tokens were reserved, {len(job.token_ids)} came",
            )
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
