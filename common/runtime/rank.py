"""Rank: a process of a group that is not its leader: it joins, obeys in order, and ends with it.

Passes and copies run in the main thread in the order they came; READs and digests in transfer
threads beside them, as in a room. A leader that hangs up ends the process at once: nothing of a
group outlives it. As a process: `python -m common.runtime.rank ROOM RANK HOST:PORT`, with the
settings as JSON on standard input and the secret in BATON_SECRET.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from common.config.loading import parse_settings, room_secret
from common.contract.regions import Agent
from common.errors import RoomLost, ServingError
from common.observe.logs import start_logging
from common.ops.digest import Signature
from common.parallel.placement import Placement
from common.runtime.choosing import chosen
from common.runtime.graphs import group_reserve, record
from common.runtime.group import Channel, enter
from common.runtime.grouped import GroupModel
from common.runtime.landing import Landing
from common.runtime.loaded import use_device
from common.runtime.memory import TextMemory
from common.runtime.moving import Moving
from common.runtime.orders import (
    Abandon,
    Agents,
    Choose,
    Commit,
    Count,
    Counted,
    Ended,
    Failed,
    Fetch,
    Freed,
    Here,
    Measured,
    Mirrored,
    Order,
    Pass,
    Ping,
    Pong,
    Pull,
    Sign,
    Weigh,
)
from common.runtime.part import Plan, first_word, read_part
from common.runtime.place import Place
from common.transfer.nixl import NixlLink
from common.transfer.receiver import Receiver

log = logging.getLogger("baton.rank")
SWEEP_S = 0.5
MIRRORED = ("clear_slot", "copy_slot", "copy_page", "keep_row", "restore_row", "sign_pages")


class Rank:
    """One rank's hands: what each order does."""

    def __init__(
        self,
        memory: TextMemory,
        receiver: Receiver,
        channel: Channel,
        moving: Moving | None,
    ) -> None:
        """Take what READs land in; `moving` where experts change ranks."""
        self._memory, self._moving = memory, moving
        self._receiver, self._channel = receiver, channel
        device = partial(use_device, memory.latents.pages.device)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="transfer", initializer=device)
        self._abandoned: set[int] = set()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def listen(self) -> None:
        """Answer the leader from now on: meeting and recording take longer than silence may."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        threading.Thread(target=self._sweep, name="sweep", daemon=True).start()

    def serve(self, model: GroupModel) -> None:
        """Obey, with a model that has met its group, until the leader is gone; never returns
        normally.

        Raises:
            RoomLost: the leader or another rank is gone.
        """
        logits: Tensor | None = None  # of the last pass
        while (order := self._orders.get()) is not None:
            if isinstance(order, Pass):
                logits = model.obey(order, self._memory.tensors)[0]
            elif isinstance(order, Choose) and logits is not None:
                self._channel.send(chosen(order, logits))
            elif isinstance(order, Mirrored) and order.what in MIRRORED:
                getattr(self._memory, order.what)(*order.numbers)
            elif isinstance(order, Sign):
                self._tell_signed(order.number, sign(self._memory, order.place))
            elif isinstance(order, Count):
                rows = model.load()
                self._channel.send(Counted(number=order.number, rows=rows))
            elif isinstance(order, Commit) and self._moving is not None:
                shares = Placement(order.shares)
                self._moving.commit(order.layer, order.places, shares, model.mates)
                self._channel.send(Ended(number=order.number))
            else:
                raise ServingError(f"a rank cannot obey {type(order).__name__}")
        raise RoomLost("the leader is gone")

    def _listen(self) -> None:
        while (order := self._channel.receive()) is not None:
            if isinstance(order, Ping):
                self._tell_quarantine()
            elif isinstance(order, Pull):
                self._threads.submit(self._guarded, partial(self._pull, order))
            elif isinstance(order, Fetch | Weigh):
                self._threads.submit(self._guarded, partial(self._weigh, order))
            elif isinstance(order, Agents) and self._moving is not None:
                self._moving.meet(order.agents)
            elif isinstance(order, Abandon):
                self._abandoned.add(order.number)
            else:
                self._orders.put(order)
        os._exit(3)  # a pass in progress may wait for ever for ranks that end the same way

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a transfer thread's last handler: the group ends
            log.exception("rank failed")
            self._channel.send(Failed(reason=str(error)))

    def _pull(self, order: Pull) -> None:
        number, landing = order.number, Landing(self._memory, order.place)
        writers = itertools.count(1)

        def let_go() -> None:
            """The READ has ended, or this thread writes no more; the second frees the place."""
            if next(writers) == 2:
                self._channel.send(Freed(number=number))

        try:
            self._receiver.fetch_all(
                landing.pieces(order.sources),
                order.deadline_s,
                lambda: number in self._abandoned,
                let_go,
                landing.landed,
                landing.prepare,
            )
        except ServingError as error:
            self._tell_quarantine()  # before the leader takes the request's next attempt in
            self._channel.send(Ended(number=number, code=error.code, text=str(error)))
        else:
            found = landing.signature()
            self._channel.send(Ended(number=number, sums=found.sums, unsound=found.unsound))
        let_go()
        self._abandoned.discard(number)

    def _weigh(self, order: Fetch | Weigh) -> None:
        assert self._moving is not None
        try:
            if isinstance(order, Fetch):
                sums = self._moving.fetch(order.layer, order.places, self._receiver)
            else:
                sums = self._moving.weigh(order.layer, order.places)
        except ServingError as error:
            self._channel.send(Ended(number=order.number, code=error.code, text=str(error)))
        else:
            self._channel.send(Measured(number=order.number, sums=sums, unsound=()))

    def _tell_quarantine(self) -> None:
        receiver = self._receiver
        self._channel.send(Pong(quarantined=receiver.quarantined, is_full=receiver.must_restart))

    def _tell_signed(self, number: int, found: Signature) -> None:
        self._channel.send(Measured(number=number, sums=found.sums, unsound=found.unsound))

    def _sweep(self) -> None:
        while True:
            time.sleep(SWEEP_S)
            if self._receiver.quarantined:
                self._receiver.sweep()


def sign(memory: TextMemory, place: Place) -> Signature:
    """Digest a finished prompt's memory, after clearing the rest of its last page."""
    memory.latents.zero_rest(place.pages, place.tokens)
    return memory.signed(place)


def run_rank(plan: Plan, rank: int, *, secret: str, leader: tuple[str, int]) -> None:
    """Load, join, obey; ends the process when the group ends."""
    settings = plan.settings
    join = first_word(plan, rank, secret=secret, reserve=group_reserve(plan))
    part = read_part(plan, rank)
    # All that takes long comes before the group: one that has joined may not be silent.
    memory = part.memory()
    link = NixlLink(f"rank-{rank}-{time.time_ns()}", transports=settings.transfer.transports)
    pools = memory.register(link)
    moving = Moving(rank, part.weights) if plan.moves else None
    experts = () if moving is None else moving.register(link)
    agent = Agent(name=link.agent, metadata=link.metadata(), pools=pools)
    channel, store = enter(*leader, join)
    try:
        channel.send(Here(agent=agent, experts=experts))
        receiver = Receiver(
            link, quarantine_bound=settings.transfer.quarantine_bound, verifying=False
        )
        own = Rank(memory, receiver, channel, moving)
        own.listen()
        model = part.meet(store)
        record(plan, model, memory)
        own.serve(model)
    except Exception as error:  # the process's last handler: tell, and end
        log.error("rank %d ends: %s", rank, error)
        channel.send(Failed(reason=str(error)))
        os._exit(3)


def serve(tables: dict[str, Any], room: str, rank: int, leader: str, secret: str) -> None:
    """Be a rank of a room's replica, whose leader listens at "host:port"; ends the process."""
    start_logging(room, f"rank-{rank}")
    host, _, port = leader.rpartition(":")
    settings = parse_settings(tables, source="the leader's settings")
    run_rank(Plan.of(settings, room), rank, secret=secret, leader=(host, int(port)))


if __name__ == "__main__":
    serve(json.load(sys.stdin), sys.argv[1], int(sys.argv[2]), sys.argv[3], room_secret())
