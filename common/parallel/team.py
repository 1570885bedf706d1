"""Team: what one rank's model needs of the others: its place, its tensor axis, its exchange.

Made once at start and handed down; the model works without one when it is alone. Counts how many
rows chose each expert, on the device, padding left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.spec import TextSpec
from common.parallel.choice import open_exchange
from common.parallel.collectives import Axis
from common.parallel.direct_axis import open_direct_axis, room_of
from common.parallel.exchange import Arrived, Exchange
from common.parallel.mesh import Mesh, Seat
from common.parallel.placement import Placement, Routes, even, routes

Compute = Callable[[Tensor, Tensor], Tensor]  # rows [M, Z], local ids [M, 1] -> [M, Z]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """One rank among those of its replica."""

    mesh: Mesh
    seat: Seat
    tensor: Axis
    exchange: Exchange | None  # None: this rank holds every expert
    tables: tuple[Routes, ...]  # of each MoE layer, changed in place when experts move
    load: Tensor  # int64 [MoE layers, experts]; over all ranks every row counts once

    def own(self, keep: Tensor) -> Tensor:
        """Which rows this rank hands to the experts: bool [N] of those that are no padding."""
        if self.mesh.parts == 1 or self.mesh.spread:
            return keep
        rows = torch.arange(len(keep), device=keep.device)
        return keep & (rows % self.mesh.parts == self.seat.part)

    def begin(self, layer: int, z: Tensor, ids: Tensor, keep: Tensor) -> Callable[[], Arrived]:
        """Send this rank's rows to their experts; see `Exchange.dispatch`.

        Args:
            layer: counts MoE layers.
            z: [N, Z].
            ids: int64 [N, k], ascending.
            keep: bool [N], false for padding.
        """
        assert self.exchange is not None
        return self.exchange.dispatch(z, ids, self.own(keep), self.tables[layer])

    def finish(self, arrived: Arrived, weights: Tensor, compute: Compute) -> Tensor:
        """`sum_e weights[e] * expert_e(z)` over experts that lie on any rank.

        Rows of other parts of the lane stay zero.

        Args:
            arrived: what came for this rank's experts.
            weights: fp32 [N, k].
            compute: this rank's experts on rows that came.

        Returns:
            [N, Z], dtype of the rows.
        """
        assert self.exchange is not None
        out = arrived.rows
        if len(out):
            out = compute(out, arrived.local.unsqueeze(1))
        return self.exchange.combine(out, arrived, weights)

    def count(self, layer: int, ids: Tensor, keep: Tensor) -> None:
        """Note which experts a layer's rows chose; those that cut widths count together once."""
        if self.seat.width:
            return
        real = self.own(keep).unsqueeze(1).expand(ids.shape).flatten().to(torch.int64)
        self.load[layer].scatter_add_(0, ids.flatten(), real)


def join(
    mesh: Mesh,
    rank: int,
    axes: dict[str, Axis],
    text: TextSpec,
    *,
    placement: Placement | None = None,
    spare: int = 0,
    exchange: str = "all_to_all",
    rows: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Team:
    """A rank's team.

    Args:
        mesh: the layout.
        rank: this process.
        axes: of `open_axes`.
        text: the whole model.
        placement: of every layer's experts over the shares; None spreads them evenly.
        spare: places of a share beyond an even one's, for copies of popular experts.
        exchange: its name in the settings; "direct" also for the sums over tensor ranks.
        rows: most rows of a rank in one pass, where the exchange must know.
        dtype: of activations.
        device: of the model.

    Raises:
        ConfigError: the model cannot be divided like this.
    """
    mesh.check(text)
    count, shares = text.moe.num_experts, mesh.expert
    first, most = placement or even(count, shares), shares if spare else 1
    seat, moe = mesh.seat(rank), text.moe
    opened, tensor = None, axes["tensor"]
    if exchange == "direct" and tensor.size > 1:
        room = room_of(text, rows, dtype)
        tensor = open_direct_axis(tensor, room, torch.device(device))
    if shares > 1:
        opened = open_exchange(
            exchange,
            axes["expert"],
            rows=rows,
            top=moe.top_k,
            width=moe.latent or text.hidden,
            experts=max(len(first.shares[seat.expert]), -(-count // shares) + spare),
            dtype=dtype,
            device=torch.device(device),
        )
    return Team(
        mesh=mesh,
        seat=seat,
        tensor=tensor,
        exchange=opened,
        tables=tuple(routes(first, count, device, most=most) for _ in text.moe_layers),
        load=torch.zeros(len(text.moe_layers), count, dtype=torch.int64, device=device),
    )
