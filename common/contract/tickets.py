"""Tickets: where a request's memory lies in another room, what it holds, and until when.

Imported from `messages.py` like the rest of the contract.
"""

from __future__ import annotations

from common.contract.base import Message
from common.contract.regions import Span


class TokenOut(Message, frozen=True, kw_only=True):
    """One sampled token; `top` holds (id, log-probability) pairs, best first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class EmbedPart(Message, frozen=True, kw_only=True):
    """The embeddings of one image: `tokens` rows; `digest` is the additive digest over them."""

    image: bytes
    tokens: int
    span: Span
    digest: int


class EmbedTicket(Message, frozen=True, kw_only=True):
    """encoder → router → prefill: where a request's embeddings lie, and until when."""

    nonce: bytes
    producer: str
    epoch: int
    model_print: str
    layout_print: str
    parts: tuple[EmbedPart, ...]  # in order of the request's images
    lease_s: float
    prepare_s: float = 0.0  # decoding and resizing, waiting for the tower, and in it
    wait_s: float = 0.0
    compute_s: float = 0.0


class Part(Message, frozen=True, kw_only=True):
    """One span of a ticket.

    `kind`: "state", "conv", "latent", and "canary_state", "canary_conv".
    """

    kind: str
    span: Span


class Offer(Message, frozen=True, kw_only=True):
    """First half of a cache ticket: where the request's memory lies.

    The spans hold for each of `ranks`: each has its heads of the slots and a copy of the pages.

    An offer that leaves while its memory is still being written has `borders`, and its memory
    becomes final in `portions`: first the pages in front of `final_pages` and the state before the
    last token, then the layers of slots up to each border in turn, last all the rest.
    """

    nonce: bytes
    producer: str
    epoch: int
    model_print: str
    layout_print: str
    parts: tuple[Part, ...]
    lease_s: float
    ranks: tuple[int, ...] = (0,)  # of its producer, in the order of their heads
    final_pages: int = 0
    borders: tuple[int, ...] = ()  # counted among the layers that a slot has; none: final already

    @property
    def portions(self) -> int:
        """In how many portions its memory becomes final."""
        return len(self.borders) + 2 if self.borders else 1


class Seal(Message, frozen=True, kw_only=True):
    """Second half.

    What the memory holds. `digests` maps "<kind>:<layer>" to the additive digest.
    """

    num_tokens: int
    token_hash: bytes
    digests: dict[str, int]
    first: tuple[TokenOut, ...]  # one per choice
    canary_top: tuple[
        tuple[int, float], ...
    ] = ()  # logits (not log-probabilities) after the last token
    cached_tokens: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0


class CacheTicket(Message, frozen=True, kw_only=True):
    """prefill → router → decode."""

    offer: Offer
    seal: Seal
