"""Which replica a request goes to: pure functions over what the replicas last said.

Callers pass only replicas that answer. A suspended replica, or a pair of prefill and decode
that has not passed its probe, is never chosen. Knows nothing of wires, queues or clocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica as placement sees it.

    `queued_tokens` is what it last said, `assigned_tokens` what this router has sent and not got
    back: heartbeats are a second apart, and a burst must not go to one replica.
    """

    id: str
    epoch: int
    queued_tokens: int = 0
    assigned_tokens: int = 0
    free_slots: int = 0
    free_pages: int = 0
    suspended: bool = False


Usable = Callable[[Candidate, Candidate], bool]  # may this prefill hand over to this decode?


def choose_encoder(
    images: Sequence[bytes], encoders: Sequence[Candidate], avoid: Collection[str] = ()
) -> str | None:
    """The encoder that most likely has these images: rendezvous hash of the first digest.

    A conversation keeps its first image while others are added, so all its turns meet one cache,
    and a replica that joins or leaves moves only its own share.
    """
    open_ones = _preferred(encoders, avoid)
    if not open_ones:
        return None
    return max(open_ones, key=lambda c: (_weight(images[0], c.id), c.id)).id


def choose_prefill(
    prefills: Sequence[Candidate],
    decode: Candidate,
    usable: Usable,
    *,
    avoid: Collection[str] = (),
    saved: Mapping[str, int] | None = None,
) -> str | None:
    """The prefill replica with the least work in front of this prompt.

    `saved[id]` is the number of prompt tokens its prefix cache would spare, in the same unit as the
    queue. Replicas in `avoid` are taken only when there is no other.
    """
    saved = saved or {}
    open_ones = [c for c in _preferred(prefills, avoid) if usable(c, decode)]
    if not open_ones:  # the preferred ones may all be unusable with this decode replica
        open_ones = [c for c in prefills if not c.suspended and usable(c, decode)]
    if not open_ones:
        return None
    return min(open_ones, key=lambda c: (_backlog(c) - saved.get(c.id, 0), c.id)).id


def order_decodes(
    decodes: Sequence[Candidate],
    prefills: Sequence[Candidate],
    usable: Usable,
    *,
    avoid: Collection[str] = (),
) -> list[str]:
    """Decode replicas in the order to ask for a reservation: most free slots, then most pages.

    Those in `avoid` come last; those without a usable prefill replica are left out.
    """
    partners = [c for c in prefills if not c.suspended]
    open_ones = [d for d in decodes if not d.suspended and any(usable(p, d) for p in partners)]
    open_ones.sort(key=lambda d: (d.id in avoid, -d.free_slots, -d.free_pages, d.id))
    return [d.id for d in open_ones]


def _preferred(candidates: Sequence[Candidate], avoid: Collection[str]) -> list[Candidate]:
    open_ones = [c for c in candidates if not c.suspended]
    return [c for c in open_ones if c.id not in avoid] or open_ones


def _backlog(candidate: Candidate) -> int:
    # What we sent is part of what the replica reports one heartbeat later; other routers' share is
    # only in the report. The larger of the two is right within one heartbeat.
    return max(candidate.queued_tokens, candidate.assigned_tokens)


def _weight(image: bytes, replica: str) -> bytes:
    return hashlib.blake2b(image + replica.encode(), digest_size=8).digest()
