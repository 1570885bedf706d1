"""What a journey needs of its router: wires, queue, leases, verdicts, counters.

Knows how these are started and stopped together, and nothing of a single request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from common.config.settings import Settings
from common.errors import NotReady, ServingError
from common.observe.metrics import Tally
from common.observe.otlp import Spans
from router import spans
from router.admission import POLL_S, Admission
from router.bell import Bell
from router.decisions import Decisions
from router.leases import Leases
from router.pairs import Pairs
from router.placement import Candidate
from router.recent import Recent
from router.replica import Replica
from router.switchboard import SeatTable, Switchboard


class House:
    """One router's rooms."""

    def __init__(self, settings: Settings, seats: SeatTable, *, secret: str, name: str) -> None:
        """`name` is this router's id; `secret` is what the rooms demand in `Hello`."""
        self.settings, self.name = settings, name
        self.running = 0  # requests between door and end, probes left out
        self.cuts: set[Callable[[ServingError], None]] = set()  # each ends one running request
        self.bell = Bell()
        self.board = Switchboard(
            seats, settings.router, secret=secret, caller=f"router:{name}", bell=self.bell
        )
        self.admission = Admission(settings.router, self.bell)
        self.leases = Leases(settings.transfer.renew_s)
        self.pairs = Pairs()
        self.tally = Tally()
        self.recent = Recent()
        self.spans: Spans | None = None
        if settings.trace.endpoint:
            self.spans = Spans(settings.trace.endpoint, settings.trace.share, instance=name)
            self.recent.listeners.append(partial(spans.tell, self.spans))
        self.decisions = Decisions()
        self.missing: set[str] = set()  # rooms without any replica that a request waits for
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Dial the seats and begin to renew."""
        self.board.start()
        self._keeper = asyncio.get_running_loop().create_task(self.leases.keep())

    async def stop(self) -> None:
        """Wait for what is being given back, then hang up."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=2.0)
        if self._keeper is not None:
            self._keeper.cancel()
        await self.board.stop()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must end even when the request that began it is gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cut(self, error: ServingError) -> None:
        """End every running request with `error`, which its reader is told."""
        for cut in list(self.cuts):
            cut(error)

    def seen(self, room: str) -> tuple[list[Candidate], dict[str, Replica]]:
        """The replicas of a room for placement, and by id."""
        present = self.board.present(room)
        return [r.candidate() for r in present], {r.id: r for r in present}

    def pairs_ready(self) -> int:
        """How many pairs of prefill and decode replicas take new requests now."""
        prefills, decodes = (
            [c for c in self.seen(room)[0] if not c.suspended] for room in ("prefill", "decode")
        )
        return self.pairs.count_usable(prefills, decodes)

    async def choose(self, room: str, pick: Callable[[list[Candidate]], str | None]) -> Replica:
        """The replica that `pick` names, as soon as it names one.

        Raises:
            NotReady: it named none for as long as a request may wait.
        """
        wait_s = self.settings.router.queue_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    candidates, by_id = self.seen(room)
                    key = pick(candidates)
                    if key is not None:
                        return by_id[key]
                    if not candidates:
                        self.missing.add(room)
                    await self.bell.wait(POLL_S)
        except TimeoutError:
            raise NotReady(f"no {room} replica could be used for {wait_s:g} s") from None
