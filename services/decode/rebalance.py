"""Rebalancer: watches the experts' load and moves experts between ranks while the pool runs.

A thread of its own counts, chooses (`balance.py`) and has experts fetched and verified, layer by
layer; the switch of a layer is made in the engine's thread, between two passes, on every rank in
the same place of its orders. A layer whose experts did not arrive as they were sent stays as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.contract.regions import Agent
from common.errors import RoomLost, ServingError, TransferError
from common.observe.metrics import Tally
from common.parallel.placement import Placement, even
from common.runtime.grouped import GroupModel
from common.runtime.leading import Leading
from common.runtime.loop import EngineLoop
from common.runtime.moving import READ_S, Moving
from common.runtime.orders import Commit, Count, Fetch, Weigh
from common.transfer.link import Link
from common.transfer.receiver import Receiver
from services.decode.balance import Move, balance, imbalance, moves, settled

log = logging.getLogger(__name__)
NODE_SHARES = 8  # neighbouring shares with fast links between them
LEAST = 64  # mean rows of an expert between two looks; with fewer, chance alone looks uneven
WORTH = 1.05  # the busiest share must have so many times the rows that it would have
COMMIT_S = 30.0  # for all ranks to reach an order in their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one look came to: the busiest share's rows over the mean, over all layers."""

    before: float
    after: float  # of the same rows
    layers: int  # that changed
    experts: int  # that moved


class Rebalancer:
    """One group's."""

    def __init__(
        self,
        leading: Leading,
        moving: Moving,
        receiver: Receiver,
        loop: EngineLoop,
        tally: Tally,
        *,
        spare: int,
    ) -> None:
        """`moving` and `receiver` are the leader's own; `spare` are places beyond an even share."""
        model = leading.loaded.model
        assert isinstance(model, GroupModel)
        self._leading, self._moving, self._receiver = leading, moving, receiver
        self._loop, self._tally, self._model = loop, tally, model
        count, shares = model.mates.load.shape[1], leading.mesh.expert
        self._places = -(-count // shares) + spare
        self.placements = [even(count, shares)] * len(model.mates.load)
        self.least = LEAST
        self._seen = torch.zeros_like(model.mates.load, device="cpu")
        self._told = threading.Event()
        self._thread: threading.Thread | None = None

    def introduce(self, link: Link) -> None:
        """Register the leader's experts and let all ranks know each other."""
        experts = self._moving.register(link)
        own = Agent(name=link.agent, metadata=link.metadata(), pools=experts)
        self._moving.meet(self._leading.introduce(own))

    def start(self, every_s: float) -> None:
        """Look every so often."""
        self._thread = threading.Thread(target=self._watch, args=(every_s,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._told.set()

    def look(self) -> Gain | None:
        """Count, and move what is worth it; waits until it is done. None: too little came yet.

        Raises:
            RoomLost: the group is over.
            TransferError: experts did not arrive, or not as they were sent; earlier layers stay
                moved.
        """
        load = self._since_last()
        if load is None:
            return None
        before = after = 0.0
        layers = experts = 0
        for layer, rows in enumerate(load.tolist()):
            old = self.placements[layer]
            new = self._chosen(rows, old)
            was, would = imbalance(rows, old), imbalance(rows, new)
            is_worth = was >= WORTH * would
            before, after = before + was, after + (would if is_worth else was)
            if not is_worth:
                continue
            todo = moves(old, new)
            self._move(layer, new, todo)
            self.placements[layer] = new
            layers, experts = layers + 1, experts + len(todo)
        gain = Gain(
            before=before / len(load), after=after / len(load), layers=layers, experts=experts
        )
        self._tally.add("baton_experts_moved_total", float(experts))
        self._tally.set("baton_expert_imbalance", gain.after)
        log.info(
            "experts: the busiest share has %.2f times the mean, %.2f after moving %d in %d layers",
            gain.before,
            gain.after,
            experts,
            layers,
        )
        return gain

    def _watch(self, every_s: float) -> None:
        while not self._told.wait(every_s):
            try:
                self.look()
            except RoomLost:
                return
            except ServingError as error:
                log.warning("experts stay where they are: %s", error)

    def _since_last(self) -> torch.Tensor | None:
        asked = self._leading.ask_all(lambda _, number: Count(number=number))
        own = self._loop.ask(self._model.load).result()
        found = self._leading.await_all(asked, COMMIT_S, self._told.is_set)
        now = torch.tensor([own, *found]).sum(0)
        load = now - self._seen
        if float(load.float().mean()) < self.least:
            return None
        self._seen = now
        return load

    def _chosen(self, rows: Sequence[int], old: Placement) -> Placement:
        shares = len(old.shares)
        nodes = max(1, shares // NODE_SHARES) if shares % NODE_SHARES == 0 else 1
        return settled(old, balance(rows, shares=shares, places=self._places, nodes=nodes))

    def _move(self, layer: int, new: Placement, todo: Sequence[Move]) -> None:
        """Fetch on every rank, compare with what the holders have, switch on every rank."""
        mesh = self._leading.mesh
        wanted: dict[int, list[tuple[int, int]]] = {}  # by rank: rank and place of each expert
        into: dict[int, tuple[int, ...]] = {}
        for rank in range(mesh.world):
            own = [move for move in todo if move.share == mesh.seat(rank).expert]
            holders = mesh.group("expert", rank)
            wanted[rank] = [
                (holders[move.source], self._place(layer, move.source, move.expert)) for move in own
            ]
            into[rank] = tuple(move.place for move in own)
        asked: dict[int, list[int]] = {}  # by holder: places that others fetch
        for places in wanted.values():
            for holder, place in places:
                if place not in asked.setdefault(holder, []):
                    asked[holder].append(place)
        landed = self._everywhere(layer, wanted, asked)
        for rank, places in wanted.items():
            _compare(rank, places, asked, *landed)
        self._switch(layer, new, into)

    def _everywhere(
        self, layer: int, wanted: dict[int, list[tuple[int, int]]], asked: dict[int, list[int]]
    ) -> tuple[dict[int, dict[str, int]], dict[int, dict[str, int]]]:
        """Digests of what landed, and of what was to land, by rank."""

        def fetch(rank: int, number: int) -> Fetch | None:
            places = tuple(wanted[rank])
            return Fetch(number=number, layer=layer, places=places) if places else None

        def weigh(rank: int, number: int) -> Weigh | None:
            places = tuple(asked.get(rank, ()))
            return Weigh(number=number, layer=layer, places=places) if places else None

        fetching, weighing = self._leading.ask_all(fetch), self._leading.ask_all(weigh)
        others = range(1, self._leading.mesh.world)
        landed = {0: self._moving.fetch(layer, wanted[0], self._receiver)} if wanted[0] else {}
        sent = {0: self._moving.weigh(layer, asked.get(0, ()))}
        found = self._leading.await_all(fetching, READ_S, self._told.is_set)
        held = self._leading.await_all(weighing, READ_S, self._told.is_set)
        for rank, signed in zip([r for r in others if wanted[r]], found, strict=True):
            landed[rank] = signed.sums
        for rank, signed in zip([r for r in others if asked.get(r)], held, strict=True):
            sent[rank] = signed.sums
        return landed, sent

    def _switch(self, layer: int, new: Placement, into: dict[int, tuple[int, ...]]) -> None:
        def order(rank: int, number: int) -> Commit:
            return Commit(number=number, layer=layer, places=into[rank], shares=new.shares)

        def switch() -> list[object]:
            asked = self._leading.ask_all(order)  # in every rank's turn, as passes are
            self._moving.commit(layer, into[0], new, self._model.mates)
            return list(asked)

        asked = self._loop.ask(switch).result()
        self._leading.await_all(asked, COMMIT_S, lambda: False)  # type: ignore[arg-type]

    def _place(self, layer: int, share: int, expert: int) -> int:
        return self.placements[layer].shares[share].index(expert)


def _compare(
    rank: int,
    places: Sequence[tuple[int, int]],
    asked: dict[int, list[int]],
    landed: dict[int, dict[str, int]],
    sent: dict[int, dict[str, int]],
) -> None:
    for at, (holder, place) in enumerate(places):
        there = asked[holder].index(place)
        for name, value in landed[rank].items():
            number, _, part = name.partition(":")
            if int(number) == at and sent[holder][f"{there}:{part}"] != value:
                raise TransferError(
                    f"an expert's {part} came to rank {rank} otherwise than rank {holder} has it"
                )
