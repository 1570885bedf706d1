"""The encoder loop: batch images of several requests, run the tower, keep the embeddings.

One thread owns tower, cache and arena (`EngineLoop`). Images are decoded by worker threads before
they get here. An image that is wanted twice while it is computed is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from torch import Tensor

from common.config.settings import EncoderSettings
from common.contract.messages import EmbedPart, EmbedTicket, EncodeJob, ImageRef, ImagesMissing
from common.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    ImageRejected,
    InvalidRequest,
    PoisonedState,
    RoomLost,
    ServingError,
)
from common.observe.metrics import Tally
from common.runtime.loop import EngineLoop, promise
from common.transfer.digest import digest_embeds
from common.transfer.owner import Owner
from services.encoder.embed_cache import EmbedCache, Entry

Reply = EmbedTicket | ImagesMissing
Prepared = tuple[Tensor, tuple[int, int]]  # uint8 [patches, 3, 14, 14] and its grid (h, w)


@dataclass(slots=True, eq=False)
class Wanted:
    """One request's images on their way."""

    job: EncodeJob
    deadline: float
    caller: str = ""  # the router it came from
    prepare_s: float = 0.0  # spent on decoding its images
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0  # its first image went into the tower; 0: none had to
    future: Future[Reply] = field(default_factory=promise)
    entries: dict[bytes, Entry] = field(default_factory=dict)  # held
    ended: bool = False


class Tower(Protocol):
    """What embeds images: [tokens, text_hidden] of each."""

    def forward(self, images: Sequence[Prepared]) -> list[Tensor]: ...


def key_of(image: ImageRef) -> bytes:
    """What decides an image's pixels: its bytes, and the size they were read as."""
    return image.digest + image.width.to_bytes(4, "little") + image.height.to_bytes(4, "little")


class EncoderEngine:
    """Images in, embed tickets out."""

    def __init__(
        self,
        tower: Tower,
        cache: EmbedCache,
        owner: Owner,
        settings: EncoderSettings,
        tally: Tally,
    ) -> None:
        """Build the engine; `loop.start()` begins."""
        self._tower, self._cache, self._owner = tower, cache, owner
        self._settings, self._tally = settings, tally
        self._queue: dict[bytes, tuple[Prepared, int]] = {}  # oldest first; value: image, tokens
        self._waiting: list[Wanted] = []
        self._leased: list[Wanted] = []
        self.loop = EngineLoop("encoder", self._step)
        self.loop.on_failure(self._fail_all)

    # --- from any thread

    def submit(
        self,
        job: EncodeJob,
        prepared: dict[bytes, Prepared],
        caller: str = "",
        prepare_s: float = 0.0,
    ) -> Future[Reply]:
        """Queue a request; `prepared` has, by key, the images whose bytes came with the job.

        `prepare_s` is what their decoding took; the ticket repeats it.

        The future has a ticket, or names images that are neither here nor kept.
        """
        deadline = time.monotonic() + job.deadline_s
        wanted = Wanted(job=job, caller=caller, deadline=deadline, prepare_s=prepare_s)
        self.loop.post(lambda: self._enqueue(wanted, prepared), wanted.future.set_exception)
        return wanted.future

    def cancel(self, request: str) -> None:
        """Forget a request wherever it stands."""
        self._owner.abort(request)
        self.loop.post(lambda: self._cancel(request))

    def caller_lost(self, caller: str) -> None:
        """Encode nothing more for a router that is gone; its tickets end with their leases."""
        self.loop.post(lambda: self._forget_caller(caller))

    def sweep(self) -> None:
        """Expire leases and deadlines; called every half second."""
        self._owner.sweep()
        self.loop.post(self._expire)

    def counts(self) -> tuple[int, int, int, int]:
        """(images queued, requests waiting, entries held by requests, entries only cached)."""
        held, cached = self._cache.counts()
        return len(self._queue), len(self._waiting), held, cached

    def oldest_s(self) -> float:
        """Seconds the oldest request has waited for its images."""
        now = time.monotonic()
        return max((now - wanted.arrived for wanted in list(self._waiting)), default=0.0)

    # --- in the loop's thread

    def _enqueue(self, wanted: Wanted, prepared: dict[bytes, Prepared]) -> None:
        if len(self._waiting) >= self._settings.queue_limit:
            wanted.future.set_exception(CapacityError("too many requests wait for the encoder"))
            return
        rows = self._cache.arena.rows.shape[0]
        tokens = sum(image.tokens for image in {i.digest: i for i in wanted.job.images}.values())
        if tokens > rows:
            wanted.future.set_exception(
                InvalidRequest(
                    f"the images have {tokens} tokens, an encoder replica keeps {rows}; send fewer "
                    "or smaller ones, or raise encoder.arena_rows"
                )
            )
            return
        missing = []
        for at, image in enumerate(wanted.job.images):
            key = key_of(image)
            if (entry := self._cache.find(key)) is not None:
                self._tally.add("baton_image_hits_total")
                self._hold(wanted, entry)
            elif key in prepared:
                self._queue.setdefault(key, (prepared[key], image.tokens))
            elif key not in self._queue:
                missing.append(at)
        if missing:
            self._drop(wanted)
            wanted.future.set_result(ImagesMissing(indices=tuple(missing)))
            self._forget_unwanted()
            return
        self._waiting.append(wanted)
        self._settle()

    def _hold(self, wanted: Wanted, entry: Entry) -> None:
        if entry.key not in wanted.entries:
            self._cache.hold(entry, probe=wanted.job.probe)
            wanted.entries[entry.key] = entry

    def _step(self) -> bool:
        if not self._queue:
            return False
        started = time.perf_counter()
        keys: list[bytes] = []
        patches = 0
        for key, ((pixels, _), _) in self._queue.items():
            if keys and patches + pixels.shape[0] > self._settings.batch_patches:
                break
            keys.append(key)
            patches += pixels.shape[0]
        self._started(keys)
        embeddings = self._tower.forward([self._queue[key][0] for key in keys])
        for key, rows in zip(keys, embeddings, strict=True):
            _, tokens = self._queue.pop(key)
            self._store(key, rows, tokens)
        self._tally.add("baton_images_total", float(len(keys)))
        self._tally.observe("baton_encode_seconds", time.perf_counter() - started)
        self._tally.observe("baton_encode_patches", float(patches))
        self._settle()
        return True

    def _started(self, keys: list[bytes]) -> None:
        now, keyed = time.monotonic(), set(keys)
        for wanted in self._waiting:
            if not wanted.started and any(key_of(image) in keyed for image in wanted.job.images):
                wanted.started = now

    def _store(self, key: bytes, rows: Tensor, tokens: int) -> None:
        wanting = [w for w in self._waiting if any(key_of(i) == key for i in w.job.images)]
        digest, finite = digest_embeds(rows)
        error: ServingError | None = None
        if rows.shape[0] != tokens:
            text = f"the image gives {rows.shape[0]} tokens, the prompt has room for {tokens}"
            error = ImageRejected(text)
        elif not finite:
            self._tally.add("baton_poisoned_total")
            error = PoisonedState("the image's embeddings are not finite")
        else:
            try:
                entry = self._cache.put(key, rows, digest)
            except CapacityError as full:
                error = full
        for wanted in wanting:
            if error is None:
                self._hold(wanted, entry)
            else:
                self._end(wanted, error)

    def _settle(self) -> None:
        """Give tickets to the requests whose images are all here."""
        for wanted in list(self._waiting):
            keys = [key_of(image) for image in wanted.job.images]
            if all(key in wanted.entries for key in keys):
                self._waiting.remove(wanted)
                self._lease(wanted, [wanted.entries[key] for key in keys])

    def _lease(self, wanted: Wanted, entries: list[Entry]) -> None:
        parts = [
            EmbedPart(
                image=image.digest,
                tokens=entry.tokens,
                span=self._cache.arena.span(entry.start),
                digest=entry.digest,
            )
            for image, entry in zip(wanted.job.images, entries, strict=True)
        ]
        self._leased.append(wanted)
        on_end: Callable[[str], None] = partial(self._lease_ended, wanted)
        job = wanted.job
        ticket = self._owner.offer_embeds(job.request, parts, on_end, probe=job.probe)
        now = time.monotonic()
        started = wanted.started or now
        wanted.future.set_result(
            msgspec.structs.replace(
                ticket,
                prepare_s=wanted.prepare_s,
                wait_s=started - wanted.arrived,
                compute_s=now - started,
            )
        )

    def _lease_ended(self, wanted: Wanted, outcome: str) -> None:
        self._tally.add("baton_tickets_total", outcome=outcome)
        self.loop.post(lambda: self._drop(wanted, forget=outcome == "refused"))

    def _drop(self, wanted: Wanted, *, forget: bool = False) -> None:
        """Let a request's embeddings go; refused ones are made anew for the next who asks."""
        if wanted.ended:
            return
        wanted.ended = True
        for entry in wanted.entries.values():
            if forget:
                self._cache.forget(entry)
            self._cache.drop(entry, probe=wanted.job.probe)
        self._leased = [other for other in self._leased if other is not wanted]

    def _end(self, wanted: Wanted, error: ServingError) -> None:
        self._waiting = [other for other in self._waiting if other is not wanted]
        self._drop(wanted)
        if not wanted.future.done():
            wanted.future.set_exception(error)

    def _cancel(self, request: str) -> None:
        self._owner.abort(request)  # a ticket given out since the message came
        for wanted in [w for w in self._waiting if w.job.request == request]:
            self._end(wanted, Cancelled(f"request {request} was cancelled"))
        self._forget_unwanted()

    def _forget_caller(self, caller: str) -> None:
        for wanted in [w for w in self._waiting if w.caller == caller]:
            self._end(wanted, Cancelled(f"{caller} is gone"))
        self._forget_unwanted()

    def _expire(self) -> None:
        now = time.monotonic()
        for wanted in [w for w in self._waiting if now > w.deadline]:
            self._end(wanted, DeadlineExceeded("the images were not encoded in time"))
        self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        still = {key_of(image) for wanted in self._waiting for image in wanted.job.images}
        self._queue = {key: value for key, value in self._queue.items() if key in still}

    def _fail_all(self, error: BaseException) -> None:
        for wanted in list(self._waiting):
            self._end(wanted, RoomLost(f"the encoder engine stopped: {error}"))
