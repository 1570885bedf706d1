"""Turning a finished prompt into a ticket: sample, sign, offer, seal.

Nothing is offered before the memory agrees with itself: the slot's header must say that it is this
request's and absorbed exactly its tokens, and every value must be finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from common.contract.messages import CacheTicket, Part, PrefillJob, Seal, TokenOut
from common.contract.prefixes import token_hash
from common.errors import PoisonedState, ServingError
from common.grammar.library import Matcher
from common.runtime.memory import TextMemory
from common.sampling.sampler import Row, mask_of, sample
from common.transfer.owner import Owner

CANARY_TOP = 8  # logits a canary is compared on


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A prompt whose last token was just computed."""

    job: PrefillJob
    nonce: bytes
    slot: int
    canary_slot: int
    pages: tuple[int, ...]
    wait_s: float
    compute_s: float
    matcher: Matcher | None = None  # at the answer's beginning


def publish(
    work: Finished,
    logits: Tensor,
    memory: TextMemory,
    owner: Owner,
    on_end: Callable[[str], None],
) -> CacheTicket:
    """Offer and seal one request.

    Args:
        work: the prompt.
        logits: fp32 [vocab] after its last token.
        memory: where its state and pages lie.
        owner: gives out the ticket.
        on_end: called with the outcome when the ticket ended.

    Raises:
        PoisonedState: a logit or a value of the state is not finite.
        DeadEnd: the answer's grammar allows no first token.
        HandoffRefused: the slot's header disagrees.
    """
    total = len(work.job.token_ids)
    first = _first_tokens(work.job, logits, work.matcher)
    states, latents = memory.states, memory.latents
    states.expect(work.slot, work.nonce, total)
    latents.zero_rest(work.pages, total)
    signature = states.sign(work.slot) | latents.signed(work.pages, total)
    parts = [Part(kind=kind, span=span) for kind, span in states.span(work.slot).items()]
    parts += [Part(kind="latent", span=span) for span in latents.spans(work.pages)]
    if work.canary_slot >= 0:
        states.expect(work.canary_slot, work.nonce, total - 1)
        signature = signature | states.sign(work.canary_slot, prefix="canary_")
        spans = states.span(work.canary_slot).items()
        parts += [Part(kind=f"canary_{kind}", span=span) for kind, span in spans]
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
    offer = owner.offer(work.job.request, parts, on_end, probe=work.job.probe)
    return owner.seal(offer.nonce, seal)


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
