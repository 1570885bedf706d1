"""The decode room: `Reserve`, then one verb, `DecodeJob` → `Accepted` and frames of tokens."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common.config.settings import Settings
from common.contract.messages import (
    Cancel,
    DecodeJob,
    Done,
    Endpoint,
    Holdings,
    Inventory,
    Load,
    Message,
    Pace,
    Ping,
    PullJob,
    Release,
    Renew,
    Reserve,
    TokenFrame,
)
from common.errors import CapacityError
from common.grammar.library import Filler
from common.runtime.choosing import Far, Near, Stepper
from common.runtime.graphs import check_memory, graphed
from common.runtime.grouped import GroupModel
from common.runtime.leading import Starter
from common.runtime.moving import Moving
from common.runtime.text_room import TextRoom
from common.sampling.masks import Masks
from common.transfer.slices import slot_memory
from services.decode.engine import DecodeEngine
from services.decode.intake import Intake
from services.decode.ranks import GroupIntake
from services.decode.rebalance import Rebalancer
from services.decode.skew import Skew


class DecodeRoom(TextRoom):
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

        `starter` and `host` are those of `TextRoom`. On a GPU steps are captured here.
        """
        check_memory(settings)
        super().__init__(
            "decode", settings, secret=secret, replica=replica, starter=starter, host=host
        )
        transfer, loaded = settings.transfer, self.loaded
        own = (self.memory, self.receiver, self.identity, self.grammars)
        intake = Intake if self.leading is None else partial(GroupIntake, self.leading)
        self.intake = intake(
            *own,
            whole=slot_memory(loaded.spec.text, loaded.dtype.itemsize),
            deadline_s=transfer.deadline_s,
            claim=self.claim,
            follow=self.follow,
        )
        self._pulls = ThreadPoolExecutor(
            self.memory.slots.total, thread_name_prefix="pull", initializer=self._use_device
        )
        self._masks = Masks(Filler(), pinned=loaded.device.type == "cuda")
        self.engine = DecodeEngine(
            self._stepper(settings),
            self.memory,
            self.intake,
            self.threads,
            settings.decode,
            self.tally,
            pull_threads=self._pulls,
            epoch=self.room.epoch,
            lease_s=transfer.lease_s,
            canary_bound=transfer.canary_bound,
            push=self._push,
            release=self.release,
            masks=self._masks,
        )

        self._skew = Skew(loaded.model.load, self.engine.loop.ask, self.tally)
        self.rebalancer: Rebalancer | None = None
        self._look_s = settings.decode.rebalance_s
        if self.leading is not None and self._look_s:
            self.rebalancer = Rebalancer(
                self.leading,
                Moving(0, self.loaded.model.weights),
                self.receiver,
                self.engine.loop,
                self.tally,
                spare=settings.decode.spare_experts,
            )
            self.rebalancer.introduce(self.link)

    def _stepper(self, settings: Settings) -> Stepper:
        """Passes of this process's model, or of the group it leads."""
        model = self.loaded.model
        if self.leading is None:
            return Near(graphed(model, self.memory, settings))
        assert isinstance(model, GroupModel)
        return Far(self.leading, model)

    async def open(self, host: str) -> Endpoint:
        """Start the engine and listen on a free port of `host`."""
        room = self.room
        room.on(Reserve, self._reserve)
        room.on(PullJob, self._pull)
        room.on(DecodeJob, self._decode)
        room.on(Renew, self._renew)
        room.on(Release, self._on_release)
        room.on(Cancel, self._cancel)
        room.on(Pace, self._pace)
        room.on(Ping, self.load)
        room.on(Inventory, self.holdings)
        room.on_lost = self.engine.caller_lost
        room.every_sweep(self.engine.sweep)
        endpoint = await self.start(host, self.engine.loop)
        if self.rebalancer is not None:
            self.rebalancer.start(self._look_s)
        return endpoint

    async def close(self) -> None:
        """Stop listening, then computing."""
        if self.rebalancer is not None:
            self.rebalancer.stop()
        self._pulls.shutdown(wait=False, cancel_futures=True)
        await self.stop(self.engine.loop)
        self._masks.close()

    async def load(self, message: Ping, caller: str) -> Load:
        """How busy this replica is."""
        helds = self.engine.helds()
        self.gauge()
        self._skew.look(time.monotonic())
        return Load(
            epoch=self.room.epoch,
            queued=sum(held.stage in ("reserved", "fetching") for held in helds),
            running=sum(held.stage == "running" for held in helds),
            free_slots=sum(lane.slots.free for lane in self.memory.lanes),
            free_pages=sum(lane.pages.free for lane in self.memory.lanes),
            total_slots=sum(lane.slots.total for lane in self.memory.lanes),
            total_pages=sum(lane.pages.total for lane in self.memory.lanes),
            suspended=self.is_over(self.engine.loop),
            leaving=self.room.is_leaving,
            counters=self.tally.snapshot(),
        )

    async def holdings(self, message: Inventory, caller: str) -> Holdings:
        """What requests and leases hold here."""
        helds = [held for held in self.engine.helds() if not held.reserve.probe]
        return Holdings(
            room="decode",
            id=self.room.id,
            epoch=self.room.epoch,
            pages=sum(held.num_pages() for held in helds),
            slots=sum(len(held.slots) for held in helds),
            quarantine=self.quarantined,
            tickets=sum(held.stage in ("reserved", "fetching") for held in helds),
        )

    async def _reserve(self, message: Reserve, caller: str) -> Message:
        if self.room.is_leaving:
            raise CapacityError(f"{self.room.id} is leaving and takes no new request")
        if self.must_restart:
            raise CapacityError(f"{self.room.id} waits for {self.quarantined} late READs")
        return await asyncio.wrap_future(self.engine.reserve(message, caller))

    async def _pull(self, job: PullJob, caller: str) -> Message:
        return await asyncio.wrap_future(self.engine.pull(job))

    async def _decode(self, job: DecodeJob, caller: str) -> Message:
        return await asyncio.wrap_future(self.engine.submit(job))

    async def _renew(self, message: Renew, caller: str) -> Message:
        self.engine.renew(message.nonces)
        return Done()

    async def _on_release(self, message: Release, caller: str) -> Message:
        self.engine.release(message.nonce)
        return Done()

    async def _cancel(self, message: Cancel, caller: str) -> Message:
        self.engine.cancel(message.request)
        return Done()

    async def _pace(self, message: Pace, caller: str) -> Message:
        self.engine.pace(message.request, message.paused)
        return Done()

    def _push(self, caller: str, frame: TokenFrame) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.room.push, caller, frame)
