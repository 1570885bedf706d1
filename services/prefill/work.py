"""One prompt on its way through the prefill room, and its next share of a step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.cache.mla_pool import pages_of
from common.config.spec import CHUNK
from common.contract.messages import CacheTicket, Offer, PrefillJob
from common.grammar.library import Matcher
from common.model.batch import Share
from common.runtime.loop import promise
from common.runtime.memory import TextMemory
from services.prefill.embeds import Pull


@dataclass(slots=True, eq=False)
class Work:
    """One prompt on its way."""

    job: PrefillJob
    deadline: float
    caller: str = ""  # the router it came from
    future: Future[CacheTicket] = field(default_factory=promise)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    lane: TextMemory | None = None  # whose slots and pages these are, once it has some
    slot: int = -1
    canary_slot: int = -1
    pages: tuple[int, ...] = ()
    pull: Pull | None = None
    matcher: Matcher | None = None  # at the answer's beginning
    done: int = 0
    offer: Offer | None = None  # where it left before the prompt's end
    stage: str = (
        "queued"  # then fetching, running, published, ended; with a grammar, compiling first
    )

    @property
    def memory(self) -> TextMemory:
        """Where its slot and pages lie."""
        assert self.lane is not None, "a prompt computes once it has memory"
        return self.lane

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return len(self.job.token_ids)

    @property
    def full_pages(self) -> int:
        """Pages that are full."""
        return self.done // CHUNK

    @property
    def limit(self) -> int:
        """Where the next share must stop: a canary's last token lies in a step of its own."""
        border = (self.total - 1) // CHUNK * CHUNK
        return border if self.job.canary and self.done < border else self.total


def share_of(work: Work, slot: int, count: int, *, want_logits: bool) -> Share:
    """The next `count` tokens of a prompt, with the image rows that fall among them."""
    start, stop = work.done, work.done + count
    at: list[int] = []
    rows: list[Tensor] = []
    if work.pull is not None:
        for offset, image in zip(work.job.image_offsets, work.pull.images(), strict=True):
            low, high = max(start, offset), min(stop, offset + image.shape[0])
            if low < high:
                at.extend(range(low - start, high - start))
                rows.append(image[low - offset : high - offset])
    return Share(
        lane=work.memory.lane,
        slot=slot,
        pages=work.pages[: pages_of(stop)],
        start=start,
        token_ids=work.job.token_ids[start:stop],
        want_logits=want_logits,
        embeds=torch.cat(rows) if rows else None,
        embed_at=tuple(at),
    )


def roomiest(lanes: Sequence[TextMemory], slots: int, pages: int) -> TextMemory | None:
    """The lane with the most free slots among those where it fits; None when it fits nowhere."""
    fits = [lane for lane in lanes if lane.slots.free >= slots and lane.pages.free >= pages]
    return max(fits, key=lambda lane: lane.slots.free, default=None)
