"""Turning a finished prompt into a ticket: sample, sign, offer unless that was done, seal.

Nothing is sealed before the memory agrees with itself: the slot's header must say that it is this
request's and absorbed exactly its tokens, and every value must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from common.contract.messages import CacheTicket, Offer, Part, PrefillJob, Seal, TokenOut
from common.contract.prefixes import token_hash
from common.errors import PoisonedState, ServingError
from common.grammar.library import Matcher
from common.ops.digest import Signature
from common.runtime.leading import Leading
from common.runtime.memory import TextMemory
from common.runtime.place import Place
from common.runtime.rank import sign
from common.sampling.sampler import Row, mask_of, sample
from common.transfer.owner import Owner
from common.transfer.slices import whole

CANARY_TOP = 8  # logits a canary is compared on


SIGN_S = 10.0  # for the ranks of a lane to digest a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A prompt whose last token was just computed."""

    job: PrefillJob
    nonce: bytes
    memory: TextMemory  # where its state and pages lie
    slot: int
    canary_slot: int
    pages: tuple[int, ...]
    wait_s: float
    compute_s: float
    matcher: Matcher | None = None  # at the answer's beginning
    offer: Offer | None = None  # where it left early

    @property
    def place(self) -> Place:
        """What its ticket names."""
        return Place(
            slot=self.slot,
            pages=self.pages,
            tokens=len(self.job.token_ids),
            canary_slot=self.canary_slot,
        )


class Signer:
    """Digests a finished request's memory: here, and on the other ranks of its lane."""

    def __init__(self, leading: Leading | None = None) -> None:
        """`leading` is the group's, where the replica is one."""
        self._leading = leading

    def ranks(self, memory: TextMemory) -> tuple[int, ...]:
        """Who holds a lane's memory."""
        return (0,) if self._leading is None else tuple(self._leading.ranks(memory.lane))

    def sign(self, work: Finished) -> Signature:
        """The digests of the whole layers; waits for the ranks.

        Raises:
            HandoffRefused: two ranks' copies of the latents differ.
            RoomLost, DeadlineExceeded: a rank did not answer.
        """

        place = work.place
        if self._leading is None:
            return sign(work.memory, place)
        asked = self._leading.sign(work.memory.lane, place)
        own = [] if work.memory.lane else [sign(work.memory, place)]
        return whole([*own, *self._leading.await_all(asked, SIGN_S, lambda: False)])


def publish(
    work: Finished,
    logits: Tensor,
    signer: Signer,
    owner: Owner,
    on_end: Callable[[str], None],
) -> CacheTicket:
    """Offer one request, unless it is, and seal it.

    Args:
        work: the prompt.
        logits: fp32 [vocab] after its last token.
        signer: digests its memory.
        owner: gives out the ticket.
        on_end: called with the outcome when the ticket ended.

    Raises:
        PoisonedState: a logit or a value of the state is not finite.
        DeadEnd: the answer's grammar allows no first token.
        HandoffRefused: the slot's header disagrees, or the ticket of an early offer ended.
    """
    total = len(work.job.token_ids)
    first = _first_tokens(work.job, logits, work.matcher)
    states = work.memory.states
    states.expect(work.slot, work.nonce, total)
    if work.canary_slot >= 0:
        states.expect(work.canary_slot, work.nonce, total - 1)
    signature = signer.sign(work)
    if signature.unsound:
        raise PoisonedState(f"the state of {', '.join(signature.unsound)} is not finite")
    seal = Seal(
        num_tokens=total,
        token_hash=token_hash(work.job.token_ids),
        digests=signature.sums,
        first=first,
        canary_top=_top(logits) if work.canary_slot >= 0 else (),
        wait_s=work.wait_s,
        compute_s=work.compute_s,
    )
    offer = work.offer
    if offer is None:
        parts = parts_of(work.memory, work.slot, work.canary_slot, work.pages)
        ranks = signer.ranks(work.memory)
        offer = owner.offer(work.job.request, parts, on_end, probe=work.job.probe, ranks=ranks)
    return owner.seal(offer.nonce, seal)


def parts_of(memory: TextMemory, slot: int, canary_slot: int, pages: Sequence[int]) -> list[Part]:
    """What a ticket names; `canary_slot` is -1 where there is none."""
    parts = [Part(kind=kind, span=span) for kind, span in memory.states.span(slot).items()]
    parts += [Part(kind="latent", span=span) for span in memory.latents.spans(pages)]
    if canary_slot >= 0:
        spans = memory.states.span(canary_slot).items()
        parts += [Part(kind=f"canary_{kind}", span=span) for kind, span in spans]
    return parts


def _first_tokens(job: PrefillJob, logits: Tensor, matcher: Matcher | None) -> tuple[TokenOut, ...]:
    mask = mask_of(job.sampling, 0, matcher)
    prompt = frozenset(job.token_ids) if job.sampling.repetition != 1.0 else frozenset()
    rows = [
        Row(sampling=job.sampling, choice=choice, prompt=prompt, mask=mask)
        for choice in range(job.sampling.n)
    ]
    tokens: list[TokenOut] = []
    for token in sample(logits.expand(len(rows), -1), rows):
        if isinstance(token, ServingError):
            raise token
        tokens.append(token)
    return tuple(tokens)


def _top(logits: Tensor) -> tuple[tuple[int, float], ...]:
    best = logits.topk(min(CANARY_TOP, logits.shape[0]))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
