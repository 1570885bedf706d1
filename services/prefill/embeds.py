"""Pulling image embeddings into the landing arena, checked and verified, off the engine's thread.

Rows are taken from the arena before the READ is posted and given back when nobody needs them and
the READ has ended, whichever is later (architecture, D1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from torch import Tensor

from common.cache.embed_arena import EmbedArena
from common.contract.messages import EmbedTicket, Endpoint, PrefillJob
from common.contract.regions import Span
from common.errors import HandoffRefused, InvalidRequest, ServingError
from common.ops.digest import Signature
from common.runtime.identity import Identity
from common.runtime.loop import promise
from common.runtime.text_room import Claim
from common.transfer.digest import digest_embeds
from common.transfer.link import pair_spans
from common.transfer.receiver import Receiver

Release = Callable[[Endpoint, bytes, str], None]


class Pull:
    """The embeddings of one request on their way, and their rows once here."""

    def __init__(self, arena: EmbedArena, start: int, tokens: tuple[int, ...]) -> None:
        """`start` is the first of sum(tokens) rows; images follow each other."""
        self._arena, self._start, self._tokens = arena, start, tokens
        self._lock = threading.Lock()
        self._holders = {"request", "read", "thread"}
        self.future: Future[None] = promise()  # an error that is not ours ends the engine

    @property
    def is_wanted(self) -> bool:
        """Whether the request still lives."""
        return "request" in self._holders

    def images(self) -> list[Tensor]:
        """Rows of each image: [tokens, hidden]."""
        return list(self._arena.view(self._start).split(self._tokens))

    def span(self) -> Span:
        """Where the rows lie."""
        return self._arena.span(self._start)

    def let_go(self, holder: str) -> None:
        """One of request, read and thread needs the rows no more; the last one frees them."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            free = not self._holders
        if free:
            self._arena.give(self._start)


class EmbedPuller:
    """Starts pulls; one a request."""

    def __init__(
        self,
        arena: EmbedArena,
        receiver: Receiver,
        threads: Executor,
        identity: Identity,
        *,
        deadline_s: float,
        claim: Claim,
        release: Release,
    ) -> None:
        """Pull with `receiver` into `arena`, in `threads`.

        Args:
            arena: where rows land.
            receiver: this room's.
            threads: where pulls run.
            identity: this replica's.
            deadline_s: seconds a READ may take.
            claim: renews a ticket at the encoder; returns the seconds left of its lease.
            release: tells the encoder how its ticket ended: (owner, nonce, outcome).
        """
        self._arena, self._receiver, self._threads = arena, receiver, threads
        self._identity, self._deadline_s = identity, deadline_s
        self._claim, self._release = claim, release
        self.tamper: Callable[[list[Tensor]], None] | None = None

    def start(self, job: PrefillJob) -> Pull:
        """Take rows and begin to pull.

        Raises:
            CapacityError: the landing arena has no run of rows long enough now.
            InvalidRequest: the job names images without a ticket.
        """
        if job.embeds is None or job.embeds_from is None:
            raise InvalidRequest("the job has images but no embed ticket")
        tokens = tuple(part.tokens for part in job.embeds.parts)
        pull = Pull(self._arena, self._arena.take(sum(tokens)), tokens)
        self._threads.submit(self._run, pull, job.embeds, job.embeds_from)
        return pull

    def _run(self, pull: Pull, ticket: EmbedTicket, owner: Endpoint) -> None:
        try:
            self._fetch(pull, ticket, owner)
        except ServingError as error:
            refused = isinstance(error, HandoffRefused)
            self._release(owner, ticket.nonce, "refused" if refused else "aborted")
            pull.let_go("thread")
            pull.future.set_exception(error)
        except Exception as fault:  # nobody waits for this thread: the engine must hear of it
            pull.future.set_exception(fault)
        else:
            self._release(owner, ticket.nonce, "released")
            pull.let_go("thread")
            pull.future.set_result(None)

    def _fetch(self, pull: Pull, ticket: EmbedTicket, owner: Endpoint) -> None:
        read_ended = partial(pull.let_go, "read")
        try:
            self._receiver.check_embeds(
                ticket,
                owner,
                model_print=self._identity.model_print,
                layout_print=self._identity.layout_print,
                images=[(part.image, part.tokens) for part in ticket.parts],
                row_bytes=self._arena.row_bytes,
                lease_left_s=self._claim(owner, ticket, lambda: not pull.is_wanted),
            )
            pairs = pair_spans([pull.span()], [part.span for part in ticket.parts])
        except ServingError:
            read_ended()
            raise
        self._receiver.fetch(owner, pairs, self._deadline_s, lambda: not pull.is_wanted, read_ended)
        if self.tamper is not None:
            self.tamper(pull.images())
        signed = {f"embed:{at}": part.digest for at, part in enumerate(ticket.parts)}
        self._receiver.verify(signed, lambda: _measure(pull.images()))


def _measure(images: list[Tensor]) -> Signature:
    sums: dict[str, int] = {}
    unsound = []
    for at, rows in enumerate(images):
        sums[f"embed:{at}"], finite = digest_embeds(rows)
        if not finite:
            unsound.append(f"embed:{at}")
    return Signature(sums=sums, unsound=tuple(unsound))
