"""Moving: experts change ranks while passes go on; one order between two passes makes the switch.

Each rank READs what it will hold from a rank that holds it now, into memory of its own beside the
weights, layer by layer. Nothing that a pass reads changes until every rank has verified its part
and commits. Which expert goes where is not decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from common.contract.messages import Endpoint
from common.contract.regions import Agent, PoolInfo, Span
from common.errors import TransferError
from common.ops.digest import digest_words
from common.ops.moe.stack import ExpertStack
from common.parallel.placement import Placement, routes
from common.parallel.team import Team
from common.transfer.link import Link, Pair
from common.transfer.receiver import Receiver
from common.weights.tree import MoeWeights, TextWeights

READ_S = 30.0  # for one layer's experts
PARTS = ("w13", "w2", "w13_scale", "w2_scale")


class Moving:
    """One rank's expert weights as what others READ, and where those of others land."""

    def __init__(self, rank: int, weights: TextWeights) -> None:
        """Take a rank's weights; allocates memory for one layer's experts."""
        self._rank = rank
        self._stacks = [w.ffn.experts for w in weights.layers if isinstance(w.ffn, MoeWeights)]
        self._landing = {name: torch.empty_like(part) for name, part in _parts(self._stacks[0])}
        self._peers: list[Endpoint] = []
        self._reading = threading.Semaphore()  # held while a READ may write into the landing

    def register(self, link: Link) -> tuple[PoolInfo, ...]:
        """Make every layer's experts readable; the landing is registered, and not shown."""
        for name, part in self._landing.items():
            link.register(f"{name}:landing", part)
        return tuple(
            link.register(f"{name}:{layer}", part)
            for layer, stack in enumerate(self._stacks)
            for name, part in _parts(stack)
        )

    def meet(self, agents: Sequence[Agent]) -> None:
        """Learn how the experts of every rank are reached, this one's among them."""
        self._peers = [
            Endpoint(
                room="rank",
                id=f"rank-{rank}",
                epoch=1,  # a group lives once
                host="",
                port=0,
                agent=agent.name,
                agent_metadata=agent.metadata,
                pools=agent.pools,
                model_print="",
                layout_print="",
            )
            for rank, agent in enumerate(agents)
        ]

    def fetch(
        self, layer: int, places: Sequence[tuple[int, int]], receiver: Receiver
    ) -> dict[str, int]:
        """READ experts of one layer into the landing, in order; returns their digests.

        Args:
            layer: counts MoE layers.
            places: for each, the rank that has it and its place there.
            receiver: of this process.

        Raises:
            TransferError: a READ failed, or an earlier one may still write into the landing.
        """
        if not self._reading.acquire(blocking=False):
            raise TransferError("an earlier READ of experts has not ended; their landing is taken")
        found: dict[int, list[Pair]] = {}
        for at, (rank, place) in enumerate(places):
            for name, part in _parts(self._stacks[layer]):
                if rank == self._rank:
                    self._landing[name][at].copy_(part[place])
                    continue
                size = part[0].nbytes
                here = Span(pool=f"{name}:landing", offset=at * size, size=size)
                there = Span(pool=f"{name}:{layer}", offset=place * size, size=size)
                found.setdefault(rank, []).append((here, there))
        sources = [(self._peers[rank], pairs) for rank, pairs in found.items()]
        if sources:
            receiver.fetch_all([sources], READ_S, lambda: False, self._reading.release)
        else:
            self._reading.release()
        return _digests(self._landing.items(), range(len(places)))

    def weigh(self, layer: int, places: Sequence[int]) -> dict[str, int]:
        """The digests of experts that others READ, in the order asked."""
        return _digests(_parts(self._stacks[layer]), places)

    def commit(self, layer: int, places: Sequence[int], shares: Placement, team: Team) -> None:
        """Put what landed into its places and route by the new placement; between two passes.

        Args:
            layer: counts MoE layers.
            places: of what was fetched, in order.
            shares: the whole new placement of the layer.
            team: this rank's.
        """
        for name, part in _parts(self._stacks[layer]):
            for at, place in enumerate(places):
                part[place].copy_(self._landing[name][at])
        table = team.tables[layer]
        count, most = table.share.shape
        table.take(routes(shares, count, table.share.device, most=most))
        if table.share.is_cuda:
            torch.cuda.synchronize()  # the landing is the next layer's now


def _parts(stack: ExpertStack) -> Iterator[tuple[str, Tensor]]:
    for name in PARTS:
        part = getattr(stack, name)
        if part is not None:
            yield name, part


def _digests(parts: Iterable[tuple[str, Tensor]], places: Sequence[int]) -> dict[str, int]:
    """One sum for each place and part, named "<position in places>:<part>"."""
    found = {}
    for name, part in parts:
        for at, place in enumerate(places):
            sums, _ = digest_words(part[place].view(1, -1).view(torch.float32))
            found[f"{at}:{name}"] = int(sums[0])
    return found
