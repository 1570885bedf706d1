"""The prefill room: one verb, `PrefillJob` → `CacheTicket`, and the small messages beside it."""

from __future__ import annotations

import asyncio
import time

from common.cache.embed_arena import EmbedArena
from common.config.settings import Settings
from common.contract.messages import (
    Await,
    Cached,
    Cancel,
    Done,
    Endpoint,
    Final,
    Holdings,
    Inventory,
    Load,
    Message,
    Ping,
    PrefillJob,
    Release,
    Renew,
)
from common.errors import HandoffRefused
from common.runtime.leading import Starter
from common.runtime.room import AWAIT_S
from common.runtime.text_room import TextRoom
from common.transfer.owner import Owner
from services.prefill.embeds import EmbedPuller
from services.prefill.engine import PrefillEngine
from services.prefill.publish import Signer

LOOK_S = 0.001  # how often an offer that is waited for is looked at


class PrefillRoom(TextRoom):
    """A replica: engine, pools, agent and socket."""

    def __init__(
        self,
        settings: Settings,
        *,
        secret: str,
        replica: str = "",
        starter: Starter | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Load the model and register the pools; takes seconds.

        `starter` and `host` are those of `TextRoom`.
        """
        super().__init__(
            "prefill", settings, secret=secret, replica=replica, starter=starter, host=host
        )
        loaded, transfer = self.loaded, settings.transfer
        self.arena = EmbedArena(
            settings.prefill.landing_rows,
            loaded.spec.text.hidden,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self.pools = (*self.pools, self.link.register("embed", self.arena.rows))
        self.owner = Owner(
            self.room.id,
            self.room.epoch,
            loaded.model_print,
            loaded.layout_print,
            lease_s=transfer.lease_s,
        )
        self.puller = EmbedPuller(
            self.arena,
            self.receiver,
            self.threads,
            self.identity,
            deadline_s=transfer.deadline_s,
            claim=self.claim,
            release=self.release,
        )
        self.engine = PrefillEngine(
            loaded.model,
            self.memory,
            self.puller,
            self.grammars,
            self.owner,
            settings.prefill,
            self.tally,
            Signer(self.leading),
            layer_groups=0 if self.leading else transfer.layer_groups,
            tell=self._tell,
        )

    async def open(self, host: str) -> Endpoint:
        """Start the engine and listen on a free port of `host`."""
        room = self.room
        room.on(PrefillJob, self._prefill)
        room.on(Renew, self._renew)
        room.on(Await, self._await)
        room.on(Release, self._on_release)
        room.on(Cancel, self._cancel)
        room.on(Ping, self.load)
        room.on(Inventory, self.holdings)
        room.on_lost = self.engine.caller_lost
        room.every_sweep(self.engine.sweep)
        return await self.start(host, self.engine.loop)

    async def close(self) -> None:
        """Stop listening, then computing."""
        await self.stop(self.engine.loop)

    async def load(self, message: Ping, caller: str) -> Load:
        """How busy this replica is."""
        works, now = self.engine.works(), time.monotonic()
        queued = [work for work in works if work.stage in ("compiling", "queued", "fetching")]
        running = [work for work in works if work.stage == "running"]
        self.gauge()
        self.tally.set("baton_tickets_held", float(self.owner.held()))
        return Load(
            epoch=self.room.epoch,
            queued=len(queued),
            queued_tokens=sum(work.total - work.done for work in queued + running),
            running=len(running),
            free_slots=sum(lane.slots.free for lane in self.memory.lanes),
            free_pages=sum(lane.pages.free for lane in self.memory.lanes),
            total_slots=sum(lane.slots.total for lane in self.memory.lanes),
            total_pages=sum(lane.pages.total for lane in self.memory.lanes),
            oldest_s=max((now - work.arrived for work in queued), default=0.0),
            suspended=self.is_over(self.engine.loop),
            leaving=self.room.is_leaving,
            counters=self.tally.snapshot(),
        )

    async def holdings(self, message: Inventory, caller: str) -> Holdings:
        """What requests and leases hold here."""
        works = [work for work in self.engine.works() if not work.job.probe]
        return Holdings(
            room="prefill",
            id=self.room.id,
            epoch=self.room.epoch,
            pages=sum(len(work.pages) for work in works),
            slots=sum((work.slot >= 0) + (work.canary_slot >= 0) for work in works),
            quarantine=self.quarantined,
            embeddings=sum(work.pull is not None and work.pull.is_wanted for work in works),
            tickets=self.owner.held(),
            cached=Cached(),
        )

    async def _prefill(self, job: PrefillJob, caller: str) -> Message:
        return await asyncio.wrap_future(self.engine.submit(job, caller))

    async def _renew(self, message: Renew, caller: str) -> Message:
        if lost := self.owner.renew(message.nonces):
            raise HandoffRefused("lease", f"{len(lost)} of {len(message.nonces)} leases ended")
        return Done()

    async def _await(self, message: Await, caller: str) -> Message:
        until = time.monotonic() + AWAIT_S
        while (portions := self.owner.final(message.nonce)) <= message.known:
            if time.monotonic() >= until:
                break
            await asyncio.sleep(LOOK_S)
        return Final(portions=portions)

    def _tell(self, caller: str, message: Message) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.room.push, caller, message)

    async def _on_release(self, message: Release, caller: str) -> Message:
        self.owner.release(message.nonce, message.outcome)
        return Done()

    async def _cancel(self, message: Cancel, caller: str) -> Message:
        self.engine.cancel(message.request)
        return Done()
