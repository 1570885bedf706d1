"""One request on the level of tokens, and the messages each room gets for it.

Pure: a `Task` in, a message out. `name` is what the room knows the request by: the request's id,
and after a stumble that id with a number, so that an old pass is never taken for the new one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from common.contract.messages import (
    CacheTicket,
    DecodeJob,
    EmbedTicket,
    EncodeJob,
    Endpoint,
    ImageRef,
    Offer,
    PrefillJob,
    PullJob,
    Reserve,
    Sampling,
)
from common.errors import ImageRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`deadline` is on the event loop's clock; rows of image i start at `image_offsets[i]`."""

    request: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline: float
    images: tuple[tuple[ImageRef, bytes], ...] = ()  # each with its bytes
    image_offsets: tuple[int, ...] = ()
    image_params: tuple[str, ...] = ()  # the fields that the images came in
    salt: bytes = b""
    canary: bool = False
    probe: bool = False
    pair: tuple[str, str] | None = None  # a probe's prefill and decode replica
    trace: str = ""
    priority: int = 0  # the lower, the earlier its turn
    has_begun: bool = False  # a part of a request of which another part has its place


def reserve(task: Task, name: str) -> Reserve:
    """What decode must have room for."""
    return Reserve(
        request=name,
        prompt_tokens=len(task.token_ids),
        max_tokens=task.sampling.max_tokens,
        n=task.sampling.n,
        canary=task.canary,
        probe=task.probe,
    )


def encode(task: Task, name: str, wanted: Collection[int], left_s: float) -> EncodeJob:
    """`wanted`: indices of the images whose bytes the encoder asked for."""
    return EncodeJob(
        request=name,
        images=tuple(ref for ref, _ in task.images),
        payloads=tuple(data if i in wanted else b"" for i, (_, data) in enumerate(task.images)),
        deadline_s=left_s,
        probe=task.probe,
        trace=task.trace,
    )


@contextlib.contextmanager
def naming_images(task: Task) -> Iterator[None]:
    """An encoder's refusal that leaves the block names the client's field, not the job's.

    Raises:
        ImageRejected: what the block raised.
    """
    try:
        yield
    except ImageRejected as error:
        at = re.fullmatch(r"images\[(\d+)\]", error.param or "")
        if at is None or int(at[1]) >= len(task.image_params):
            raise
        raise ImageRejected(str(error), param=task.image_params[int(at[1])]) from None


def prefill(
    task: Task, name: str, embeds: tuple[EmbedTicket, Endpoint] | None, left_s: float
) -> PrefillJob:
    """`embeds`: the ticket of the request's images, and the encoder to pull them from."""
    return PrefillJob(
        request=name,
        token_ids=task.token_ids,
        sampling=task.sampling,
        deadline_s=left_s,
        image_offsets=task.image_offsets,
        embeds=embeds[0] if embeds else None,
        embeds_from=embeds[1] if embeds else None,
        salt=task.salt,
        canary=task.canary,
        probe=task.probe,
        trace=task.trace,
    )


def pull(
    task: Task, name: str, reservation: bytes, offered: tuple[Offer, Endpoint], left_s: float
) -> PullJob:
    """`offered`: what prefill is about to finish, and the replica to pull it from."""
    return PullJob(
        request=name,
        reservation=reservation,
        offer=offered[0],
        producer=offered[1],
        deadline_s=left_s,
        probe=task.probe,
        trace=task.trace,
    )


def decode(
    task: Task,
    name: str,
    reservation: bytes,
    ticket: tuple[CacheTicket, Endpoint],
    forced: Sequence[Sequence[int]],
    left_s: float,
) -> DecodeJob:
    """`forced`: what each choice has emitted already, when the request is continued."""
    return DecodeJob(
        request=name,
        reservation=reservation,
        ticket=ticket[0],
        producer=ticket[1],
        token_ids=task.token_ids,
        sampling=task.sampling,
        deadline_s=left_s,
        forced=tuple(tuple(ids) for ids in forced),
        probe=task.probe,
        trace=task.trace,
    )
