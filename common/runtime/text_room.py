"""TextRoom: what the prefill and the decode room have in common around their engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from common.config.settings import Settings
from common.contract.messages import EmbedTicket, Endpoint, Offer
from common.contract.protocol import lease_left, may_read
from common.contract.regions import Agent, PoolInfo
from common.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoffRefused,
    RoomLost,
    ServingError,
)
from common.grammar.shelf import GrammarShelf
from common.observe.metrics import Tally
from common.observe.process import resident_bytes
from common.runtime.identity import Identity
from common.runtime.leading import Leading, Starter
from common.runtime.loaded import load_text, use_device
from common.runtime.loop import EngineLoop
from common.runtime.memory import TextMemory
from common.runtime.part import Plan
from common.runtime.ranks import LocalRanks
from common.runtime.room import Room, describe
from common.transfer.gate import Gate
from common.transfer.measured import MeasuredReceiver
from common.transfer.nixl import NixlLink

log = logging.getLogger(__name__)
CANCEL_S = 0.1  # how soon a wait for another room notices a cancel
SPENT_S = 3.0  # a quarantine that stays full for so long does not empty itself

Follow = Callable[[Endpoint, Offer, Gate, float], AbstractContextManager[None]]
Claim = Callable[[Endpoint, Offer | EmbedTicket, Callable[[], bool]], float]


class TextRoom:
    """Model, pools, NIXL agent, receiver and socket of one replica."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        secret: str,
        replica: str,
        starter: Starter | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Load the model and register the pools; takes seconds.

        A replica of several ranks has its leader here, which the others reach at `host`; `starter`
        starts them, as processes of this host when nothing else is given.
        """
        plan = Plan.of(settings, name)
        self._local = LocalRanks(settings, name, secret)
        self.leading: Leading | None = None
        if plan.mesh.world > 1:
            self.leading = Leading(plan, secret=secret, starter=starter or self._local, host=host)
        leading = self.leading
        self.loaded = loaded = load_text(settings) if leading is None else leading.loaded
        self.room = room = Room(name, secret=secret, replica=replica)
        self.tally = Tally()
        self.identity = Identity(
            id=room.id,
            epoch=room.epoch,
            model_print=loaded.model_print,
            layout_print=loaded.layout_print,
        )
        transfer = settings.transfer
        self._use_device = partial(use_device, loaded.device)
        self.threads = ThreadPoolExecutor(
            transfer.threads, thread_name_prefix="transfer", initializer=self._use_device
        )
        self.link = NixlLink(f"{room.id}-{room.epoch}", transports=transfer.transports)
        self.memory = (
            TextMemory(
                loaded.spec.text,
                slots=plan.slots,
                pages=plan.pages,
                dtype=loaded.dtype,
                device=loaded.device,
            )
            if leading is None
            else leading.memory
        )
        self.pools: tuple[PoolInfo, ...] = self.memory.register(self.link)
        self.receiver = MeasuredReceiver(
            self.link,
            self.tally,
            quarantine_bound=transfer.quarantine_bound,
            verifying=settings.testing.verify,
        )
        self._deadline_s = transfer.deadline_s
        self._full_since: float | None = None  # when the quarantine reached its bound
        self.grammars = GrammarShelf(
            Path(settings.model.path), cache_bytes=settings.grammar.cache_bytes
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, host: str, engine: EngineLoop) -> Endpoint:
        """Start the engine and listen on a free port of `host`."""
        self._loop = asyncio.get_running_loop()
        self.room.every_sweep(self._sweep_receiver)
        engine.on_failure(self.room.hang_up)
        engine.start(self._use_device)
        if self.leading is not None:
            self.leading.on_lost = partial(_end, engine, self.room)
        ranks: tuple[Agent, ...] = () if self.leading is None else self.leading.agents
        own = (self.link, self.pools, ranks)
        return await self.room.open(
            host, lambda at, port: describe(self.room, self.identity, at, port, *own)
        )

    async def stop(self, engine: EngineLoop) -> None:
        """Stop listening, then computing."""
        await self.room.close()
        await asyncio.to_thread(engine.stop)
        if self.leading is not None:
            self.leading.close()
        await asyncio.to_thread(self._local.close)
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    def release(self, owner: Endpoint, nonce: bytes, outcome: str) -> None:
        """Tell another room how its ticket ended; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.room.peers.release, owner, nonce, outcome)

    def claim(
        self, owner: Endpoint, ticket: Offer | EmbedTicket, cancelled: Callable[[], bool]
    ) -> float:
        """Renew a ticket before its memory is read; waits, so only in a transfer thread.

        Returns:
            Seconds of its lease that are left, at least.

        Raises:
            HandoffRefused: part "lease": the owner holds it no more.
            RoomLost: the owner does not answer.
            Cancelled: `cancelled()` became true meanwhile.
        """
        assert self._loop is not None, "the room is not open"
        asked = time.monotonic()
        renewal = self.room.peers.claim(owner, ticket.nonce, self._deadline_s)
        answer = asyncio.run_coroutine_threadsafe(renewal, self._loop)
        while not wait([answer], timeout=CANCEL_S).done:
            if cancelled():
                answer.cancel()
                raise Cancelled("cancelled while its ticket was renewed")
        answer.result()
        return lease_left(asked, time.monotonic(), ticket.lease_s)

    @contextmanager
    def follow(
        self, owner: Endpoint, offer: Offer, gate: Gate, deadline_s: float
    ) -> Iterator[None]:
        """Raise `gate` as portions of an offer become final, while the block runs.

        Each question renews the lease, as `claim` does. What the owner refuses, or its loss, or the
        deadline, fails the gate.
        """
        assert self._loop is not None, "the room is not open"
        following = asyncio.run_coroutine_threadsafe(
            self._follow(owner, offer, gate, deadline_s), self._loop
        )
        try:
            yield
        finally:
            following.cancel()

    async def _follow(self, owner: Endpoint, offer: Offer, gate: Gate, deadline_s: float) -> None:
        known, failure = 0, ServingError("the room stopped asking what is final")
        try:
            async with asyncio.timeout(deadline_s):
                while known < offer.portions:
                    asked = time.monotonic()
                    known = max(known, await self.room.peers.final(owner, offer.nonce, known))
                    left_s = lease_left(asked, time.monotonic(), offer.lease_s)
                    if not may_read(left_s):
                        raise HandoffRefused("lease", f"{left_s:.1f} s of it are left")
                    gate.raise_to(known)
        except TimeoutError:
            failure = DeadlineExceeded(f"{owner.id} was not done within {deadline_s:.1f} s")
        except ServingError as error:
            failure = error
        finally:
            gate.fail(failure)  # which changes nothing where everything is final

    def is_over(self, engine: EngineLoop) -> bool:
        """Whether this replica must be replaced; its engine may be stuck, so it is not asked."""
        lost = self.leading is not None and self.leading.is_lost
        return lost or engine.failure is not None or self.must_restart

    @property
    def quarantined(self) -> int:
        """READs of all ranks that outlived their request."""
        others = 0 if self.leading is None else self.leading.quarantined
        return self.receiver.quarantined + others

    @property
    def must_restart(self) -> bool:
        """Whether a rank's quarantine has reached its bound: only the replica's end frees it."""
        return self.receiver.must_restart or (self.leading is not None and bool(self.leading.full))

    def gauge(self) -> None:
        """Bring the process's gauges up to date."""
        self.tally.set("baton_quarantine", float(self.quarantined))
        self.tally.set("baton_resident_bytes", float(resident_bytes()))

    def _sweep_receiver(self) -> None:
        if self.receiver.quarantined:
            self.threads.submit(self.receiver.sweep)
        if not self.must_restart:
            self._full_since = None
            return
        now = time.monotonic()
        self._full_since = now if self._full_since is None else self._full_since
        if now - self._full_since >= SPENT_S and not self.room.spent.is_set():
            log.error(
                "%d READs do not end%s, so their memory serves nobody: this room finishes what "
                "runs and must be started anew",
                self.quarantined,
                f" (ranks {full} are full)" if self.leading and (full := self.leading.full) else "",
            )
            self.room.spent.set()


def _end(engine: EngineLoop, room: Room, reason: str) -> None:
    """End a replica whose group has lost a rank, whatever its engine is doing."""
    lost = RoomLost(reason)
    room.hang_up(lost)  # now: a pass in progress may wait for the lost rank a while longer

    def fail() -> None:
        raise lost

    engine.post(fail)
