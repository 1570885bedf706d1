"""GroupModel: the text model of a leader, whose passes run on every rank of its group.

To an engine it is a `TextModel`. It says what a pass is before it runs its own part; the ranks run
theirs, and meet in the collectives. Logits of other lanes come back along the data axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.config.spec import TextSpec
from common.model.batch import Memory, Share, StepBatch
from common.model.text import TextModel
from common.ops.table import REFERENCE, Ops
from common.parallel.collectives import Axis
from common.parallel.team import Team
from common.runtime.orders import Order, Pass, batch_of, order_of
from common.weights.tree import TextWeights


class Replays(Protocol):
    """Steps that were captured; `common.runtime.graphs` has them."""

    def forward(self, batch: StepBatch, memory: Memory) -> Tensor:
        """See `Forward`."""

    def idle(self) -> None:
        """Take part in a step of other lanes without a request of one's own."""


class GroupModel(TextModel):
    """One rank's model in a group; on the leader also the way to start a pass."""

    def __init__(
        self,
        spec: TextSpec,
        weights: TextWeights,
        *,
        team: Team,
        data: Axis,
        ops: Ops = REFERENCE,
        exact: bool = True,
        send: Callable[[Order], None] | None = None,
    ) -> None:
        """`data` joins the lanes; `send` orders all other ranks, and is the leader's alone."""
        super().__init__(spec, weights, ops=ops, exact=exact, team=team)
        self._data, self._send, self._mesh = data, send, team.mesh
        self.mates, self._seat = team, team.seat
        self.replays: Replays | None = None  # this rank's steps, where they were captured

    def load(self) -> list[list[int]]:
        """Rows that this rank handed to each expert since the start, by MoE layer."""
        found: list[list[int]] = self.mates.load.tolist()
        return found

    def forward(self, batch: StepBatch, memory: Memory) -> Tensor:
        """A pass of shares of any lanes; logits in the order of the shares."""
        numbers = range(self._mesh.data)
        lanes = [[share for share in batch.shares if share.lane == lane] for lane in numbers]
        found = self.together(batch.kind, lanes, memory)
        if self._mesh.data == 1:
            return found[0]
        rows = [iter(logits) for logits in found]
        wanted = [next(rows[share.lane]) for share in batch.shares if share.want_logits]
        return torch.stack(wanted) if wanted else found[0]

    def keep(self, batch: StepBatch, memory: Memory) -> Tensor:
        """The same, but the logits stay with their lanes: those of the first come back."""
        numbers = range(self._mesh.data)
        lanes = [[share for share in batch.shares if share.lane == lane] for lane in numbers]
        return self._start(batch.kind, lanes, memory, keep=True)[0]

    def together(self, kind: str, lanes: Sequence[Sequence[Share]], memory: Memory) -> list[Tensor]:
        """One pass of all lanes, started by the leader.

        Args:
            kind: of every lane's batch.
            lanes: each lane's shares; an empty one is idle.
            memory: the leader's pools, of the first lane.

        Returns:
            fp32 logits of each lane, as of `TextModel.forward`.

        Raises:
            RoomLost: a rank is gone.
        """
        return self._start(kind, lanes, memory, keep=False)

    def _start(
        self, kind: str, lanes: Sequence[Sequence[Share]], memory: Memory, *, keep: bool
    ) -> list[Tensor]:
        assert self._send is not None, "only a leader starts a pass"
        order = order_of(kind, tuple(map(tuple, lanes)), keep=keep)
        self._send(order)
        return self.obey(order, memory)

    @torch.inference_mode()
    def obey(self, order: Pass, memory: Memory) -> list[Tensor]:
        """This rank's part of an ordered pass; the leader gets every lane's logits, unless they are
        to be kept, each lane's where it is.

        Raises:
            RoomLost: a rank is gone, or fell silent in an earlier pass.
        """
        if self.mates.exchange is not None:
            self.mates.exchange.check()
        dtype = self.weights.embed.dtype
        batch = batch_of(order, self._seat.lane, self.spec.hidden, dtype)
        replays = self.replays if order.kind == "steps" else None
        if batch is None:
            self.idle(memory) if replays is None else replays.idle()
            logits = torch.zeros(0, self.spec.vocab, device=self.weights.embed.device)
        else:
            forward = super().forward if replays is None else replays.forward
            logits = forward(batch, memory)
        if order.keep or self._data.size == 1 or self._seat.tensor:
            return [logits]
        # Only the lanes' first ranks speak, and only to the leader.
        counts = [sum(share.want_logits for share in lane) for lane in order.lanes]
        leading = self._seat.lane == 0
        send = [len(logits)] + [0] * (self._data.size - 1)
        receive = counts if leading else [0] * self._data.size
        found = self._data.all_to_all(logits, send, receive)
        return list(found.split(counts)) if leading else [logits]
