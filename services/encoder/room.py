"""The encoder room: one verb, `EncodeJob` → `EmbedTicket`, and the small messages beside it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from common.cache.embed_arena import EmbedArena
from common.config.image_grid import load_image_rules
from common.config.settings import Settings
from common.config.spec import VisionSpec
from common.contract.messages import (
    Cached,
    Cancel,
    Done,
    EncodeJob,
    Endpoint,
    Holdings,
    ImageRef,
    Inventory,
    Load,
    Message,
    Ping,
    Release,
    Renew,
)
from common.errors import Cancelled, ConfigError, HandoffRefused, ImageRejected
from common.observe.metrics import Tally
from common.observe.process import resident_bytes
from common.ops.select import choose_vision
from common.runtime.identity import Identity
from common.runtime.loaded import Facts, load_facts, use_device
from common.runtime.room import Room, describe
from common.transfer.nixl import NixlLink
from common.transfer.owner import Owner
from common.weights import load_vision
from services.encoder.budgets import BudgetTower
from services.encoder.embed_cache import EmbedCache
from services.encoder.engine import EncoderEngine, Prepared, key_of
from services.encoder.images import prepare
from services.encoder.moonvit import MoonVit

BUDGETS = (1024, 4096, 16_384, 65_536)  # patches of a captured pass, up to encoder.batch_patches
IMAGE_THREADS = 2  # decoding and resizing; Pillow lets go of the interpreter


def build_tower(settings: Settings, facts: Facts, vision: VisionSpec) -> MoonVit | BudgetTower:
    """The tower on its device: exact on a CPU, by patch budgets elsewhere."""
    weights = load_vision(facts.directory, facts.spec, dtype=facts.dtype, device=facts.device)
    if facts.device.type == "cpu":
        return MoonVit(vision, weights)
    ops = choose_vision(settings.model.ops, vision, dtype=facts.dtype, device=facts.device)
    most = settings.encoder.batch_patches
    budgets = [budget for budget in BUDGETS if budget < most] + [most]
    return BudgetTower(MoonVit(vision, weights, ops=ops, exact=False), budgets)


class EncoderRoom:
    """A replica: engine, arena, agent and socket."""

    def __init__(self, settings: Settings, *, secret: str, replica: str = "") -> None:
        """Load the tower and register the arena."""
        facts = load_facts(settings)
        vision = facts.spec.vision
        if vision is None:
            raise ConfigError(
                f"{settings.model.path} has no vision tower; set encoder.replicas = 0"
            )
        tower = build_tower(settings, facts, vision)
        self._rules = load_image_rules(facts.directory)
        self.room = room = Room("encoder", secret=secret, replica=replica)
        self.tally = Tally()
        self.identity = Identity(
            id=room.id,
            epoch=room.epoch,
            model_print=facts.model_print,
            layout_print=facts.layout_print,
        )
        self._threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
        self._link = NixlLink(f"{room.id}-{room.epoch}", transports=settings.transfer.transports)
        arena = EmbedArena(
            settings.encoder.arena_rows, vision.text_hidden, dtype=facts.dtype, device=facts.device
        )
        self._pools = (self._link.register("embed", arena.rows),)
        self.owner = Owner(
            room.id,
            room.epoch,
            facts.model_print,
            facts.layout_print,
            lease_s=settings.transfer.lease_s,
        )
        self.engine = EncoderEngine(
            tower, EmbedCache(arena), self.owner, settings.encoder, self.tally
        )
        self._arena, self._use_device = arena, partial(use_device, facts.device)
        self._in_hand: dict[str, bool] = {}  # jobs whose images are decoded, and whether wanted

    async def open(self, host: str) -> Endpoint:
        """Start the engine and listen on a free port of `host`."""
        room = self.room
        room.on(EncodeJob, self._encode)
        room.on(Renew, self._renew)
        room.on(Release, self._on_release)
        room.on(Cancel, self._cancel)
        room.on(Ping, self.load)
        room.on(Inventory, self.holdings)
        room.on_lost = self.engine.caller_lost
        room.every_sweep(self.engine.sweep)
        self.engine.loop.on_failure(room.hang_up)
        self.engine.loop.start(self._use_device)
        return await room.open(
            host, lambda at, port: describe(room, self.identity, at, port, self._link, self._pools)
        )

    async def close(self) -> None:
        """Stop listening, then computing."""
        await self.room.close()
        await asyncio.to_thread(self.engine.loop.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, job: EncodeJob, caller: str) -> Message:
        prepared: dict[bytes, Prepared] = {}
        self._in_hand[job.request] = True
        began = time.monotonic()
        try:
            await self._prepare_all(job, prepared)
            if not self._in_hand[job.request]:
                raise Cancelled(f"request {job.request} was cancelled")
        finally:
            self._in_hand.pop(job.request, None)
        prepare_s = time.monotonic() - began
        return await asyncio.wrap_future(self.engine.submit(job, prepared, caller, prepare_s))

    async def _prepare_all(self, job: EncodeJob, prepared: dict[bytes, Prepared]) -> None:
        loop = asyncio.get_running_loop()
        for at, (image, payload) in enumerate(zip(job.images, job.payloads, strict=True)):
            if payload and key_of(image) not in prepared:
                try:
                    prepared[key_of(image)] = await loop.run_in_executor(
                        self._threads, self._prepare, payload, image
                    )
                except ImageRejected as error:
                    raise ImageRejected(str(error), param=f"images[{at}]") from None

    def _prepare(self, payload: bytes, image: ImageRef) -> Prepared:
        patches = prepare(payload, image, self._rules)
        return torch.from_numpy(patches.pixels), (patches.grid.rows, patches.grid.columns)

    async def _renew(self, message: Renew, caller: str) -> Message:
        if lost := self.owner.renew(message.nonces):
            raise HandoffRefused("lease", f"{len(lost)} of {len(message.nonces)} leases ended")
        return Done()

    async def _on_release(self, message: Release, caller: str) -> Message:
        self.owner.release(message.nonce, message.outcome)
        return Done()

    async def _cancel(self, message: Cancel, caller: str) -> Message:
        if message.request in self._in_hand:  # its images are still being decoded
            self._in_hand[message.request] = False
        self.engine.cancel(message.request)
        return Done()

    async def load(self, message: Ping, caller: str) -> Load:
        """How busy this replica is."""
        queued, waiting, held, cached = self.engine.counts()
        self.tally.set("baton_embeddings_held", float(held))
        self.tally.set("baton_embeddings_cached", float(cached))
        self.tally.set("baton_tickets_held", float(self.owner.held()))
        self.tally.set("baton_resident_bytes", float(resident_bytes()))
        return Load(
            epoch=self.room.epoch,
            queued=queued,
            running=waiting,
            free_pages=self._arena.free,
            total_pages=self._arena.rows.shape[0],
            oldest_s=self.engine.oldest_s(),
            suspended=self.engine.loop.failure is not None,
            leaving=self.room.is_leaving,
            counters=self.tally.snapshot(),
        )

    async def holdings(self, message: Inventory, caller: str) -> Holdings:
        """What requests and leases hold here."""
        _, _, held, cached = self.engine.counts()
        return Holdings(
            room="encoder",
            id=self.room.id,
            epoch=self.room.epoch,
            embeddings=held,
            tickets=self.owner.held(),
            cached=Cached(embeddings=cached),
        )
