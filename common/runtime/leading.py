"""Leading: a leader's own part, its group, and what it asks of the ranks beside passes.

READs and digests fan out to the ranks by number and come back by it. When the group fails, whoever
waits here is told, and so is the room.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from common.contract.regions import Agent
from common.errors import (
    Cancelled,
    DeadlineExceeded,
    RoomLost,
)
from common.ops.digest import Signature
from common.runtime.asked import Answer, Asked
from common.runtime.graphs import group_reserve, record
from common.runtime.group import Leader
from common.runtime.orders import (
    Abandon,
    Agents,
    Choose,
    Chosen,
    Here,
    Mirrored,
    Order,
    Pong,
    Pull,
    RowOrder,
    Sign,
)
from common.runtime.part import Plan, first_word, read_part
from common.runtime.place import Place
from common.transfer.link import Source

POLL_S = 0.02  # how soon a wait for ranks notices a cancel
MEET_S = 60.0  # for ranks that have met to say where their memory is
GRACE_S = 2.0  # beyond a READ's own deadline, for its word to arrive


class Starter(Protocol):
    """Starts the processes of a group's ranks."""

    def start(self, rank: int, host: str, port: int) -> None:
        """Start one, which will join its leader at `host:port`."""

    def ended(self) -> Sequence[int]:
        """Ranks whose processes have ended."""


class Leading:
    """The leader of a group whose ranks are all there."""

    def __init__(
        self,
        plan: Plan,
        *,
        secret: str,
        starter: Starter,
        host: str = "127.0.0.1",
    ) -> None:
        """Start the ranks, load the leader's own part meanwhile, and meet.

        Raises:
            ConfigError: the mesh does not divide the model, does not fit, or a rank is another's.
            RoomLost: a rank did not come, or ended.
        """
        self.mesh = mesh = plan.mesh
        self._numbers = itertools.count(1)
        self._asked: dict[tuple[int, int], Asked] = {}
        self._lock = threading.Lock()
        self.on_lost: Callable[[str], None] | None = None
        self._pongs: dict[int, Pong] = {}  # the last of each rank
        self._agents: dict[int, Future[Here]] = {r: Future() for r in range(1, mesh.world)}
        own = first_word(plan, 0, secret=secret, reserve=group_reserve(plan))
        self._leader = Leader(mesh.world, own, host)
        self._leader.on_order, self._leader.on_lost = self._answered, self._lost
        try:
            for rank in range(1, mesh.world):
                starter.start(rank, host, self._leader.port)
            part = read_part(plan, 0)  # while they read theirs
            store = self._leader.gather(ended=starter.ended)
            self.memory = part.memory(partial(self._mirror, 0))
            for lane in range(1, mesh.data):
                books = part.memory(partial(self._mirror, lane), lane)
                books.lanes = self.memory.lanes
                self.memory.lanes.append(books)
            model = part.meet(store, self._leader.send)
            record(plan, model, self.memory)
            self.loaded = part.loaded(model)
            self._here = [self._agents[rank].result(MEET_S) for rank in range(1, mesh.world)]
            self.agents = tuple(here.agent for here in self._here)
        except Exception:
            self._leader.close()  # and with it every rank that has come
            raise

    def pull(
        self,
        place: Place,
        reads: Mapping[int, Sequence[Source]],
        deadline_s: float,
        on_free: Callable[[], None],
    ) -> list[Future[Signature]]:
        """Let ranks READ into a place and digest what arrives.

        `on_free` is called once for each when its destination is free again.
        """
        futures = []
        for rank, sources in reads.items():
            number = next(self._numbers)
            asked = self._ask(rank, number, on_free)
            posted = tuple((peer, tuple(pairs)) for peer, pairs in sources)
            order = Pull(number=number, place=place, sources=posted, deadline_s=deadline_s)
            self._tell(rank, order)
            futures.append(asked.future)
        return futures

    def await_all(
        self, futures: Sequence[Future[Any]], within_s: float, cancelled: Callable[[], bool]
    ) -> list[Any]:
        """The results of what ranks were asked; errors are theirs.

        Raises:
            Cancelled, DeadlineExceeded, TransferError, RoomLost: of the first rank that failed.
        """
        until = time.monotonic() + within_s + GRACE_S
        while waiting := wait(futures, timeout=POLL_S).not_done:
            failed = next((f for f in futures if f.done() and f.exception()), None)
            late = time.monotonic() > until
            if failed is None and not cancelled() and not late:
                continue
            self.abandon(waiting)
            if failed is not None:
                break
            if late:
                raise DeadlineExceeded(f"ranks did not answer within {within_s:g} s")
            raise Cancelled("cancelled while the ranks were reading")
        for future in futures:
            if future.done():
                future.result()
        return [future.result() for future in futures]

    def abandon(self, futures: set[Future[Any]]) -> None:
        """Give READs up; their destinations become free when they ended."""
        with self._lock:
            numbers = [key for key, asked in self._asked.items() if asked.future in futures]
        for rank, number in numbers:
            self._tell(rank, Abandon(number=number))

    def ranks(self, lane: int) -> range:
        """The ranks of a lane, the leader among those of the first."""
        return range(lane * self.mesh.tensor, (lane + 1) * self.mesh.tensor)

    def sign(self, lane: int, place: Place) -> list[Future[Signature]]:
        """Let a lane's other ranks digest what passes left in a place."""
        futures = []
        for rank in filter(None, self.ranks(lane)):
            number = next(self._numbers)
            futures.append(self._ask(rank, number, None).future)
            self._tell(rank, Sign(number=number, place=place))
        return futures

    def choose(self, lane: int, rows: tuple[RowOrder, ...]) -> Future[Chosen]:
        """Let a lane choose tokens from the logits that the last pass left there."""
        rank, number = self.ranks(lane)[0], next(self._numbers)
        future: Future[Chosen] = self._ask(rank, number, None).future
        self._tell(rank, Choose(number=number, rows=rows))
        return future

    def ask_all(self, make: Callable[[int, int], Order | None]) -> list[Future[Any]]:
        """Ask every other rank; `make(rank, number)` is what, None to leave it out."""
        futures = []
        for rank in range(1, self.mesh.world):
            number = next(self._numbers)
            if (order := make(rank, number)) is not None:
                futures.append(self._ask(rank, number, None).future)
                self._tell(rank, order)
        return futures

    def introduce(self, own: Agent) -> tuple[Agent, ...]:
        """Tell every rank how the experts of all are reached, `own` being the leader's."""
        others = (replace(here.agent, pools=here.experts) for here in self._here)
        agents = (own, *others)
        self._leader.send(Agents(agents=agents))
        return agents

    @property
    def is_lost(self) -> bool:
        """Whether a rank is gone, whatever a pass in progress still waits for."""
        return bool(self._leader.failure)

    @property
    def quarantined(self) -> int:
        """READs of the other ranks that outlived their request, as they said last."""
        return sum(pong.quarantined for pong in list(self._pongs.values()))

    @property
    def full(self) -> list[int]:
        """The other ranks whose quarantine has reached its bound."""
        return sorted(rank for rank, pong in list(self._pongs.items()) if pong.is_full)

    def close(self) -> None:
        """End the group."""
        self._leader.close()

    def _mirror(self, lane: int, what: str, *numbers: int) -> None:
        for rank in filter(None, self.ranks(lane)):
            self._leader.tell(rank, Mirrored(what=what, numbers=numbers))

    def _ask(self, rank: int, number: int, on_free: Callable[[], None] | None) -> Asked:
        asked = Asked(on_free=on_free)
        asked.future.set_running_or_notify_cancel()
        with self._lock:
            self._asked[rank, number] = asked
        return asked

    def _tell(self, rank: int, order: Order) -> None:
        # A group that failed answers everything that was asked of it; nothing to raise here.
        try:
            self._leader.tell(rank, order)
        except RoomLost as error:
            self._lost(str(error), tell=False)

    def _answered(self, rank: int, order: Order) -> None:
        if isinstance(order, Here):
            with self._lock:
                if not self._agents[rank].done():
                    self._agents[rank].set_result(order)
        if isinstance(order, Pong):
            self._pongs[rank] = order
        if not isinstance(order, Answer):
            return
        with self._lock:
            asked = self._asked.get((rank, order.number))
            if asked is not None and asked.is_over(order):
                del self._asked[rank, order.number]
        if asked is not None:
            asked.take(order)

    def _lost(self, reason: str, tell: bool = True) -> None:
        with self._lock:
            left = list(self._asked.values())
            self._asked.clear()
            for agent in self._agents.values():
                if not agent.done():
                    agent.set_exception(RoomLost(reason))
        for asked in left:
            asked.lose(reason)
        if tell and self.on_lost is not None:
            self.on_lost(reason)
