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
from common.parallel.collectives import Axis
from common.parallel.exchange import Exchange, open_exchange
from common.parallel.mesh import Mesh, Seat
from common.parallel.placement import Placement, even, routes

Compute = Callable[[Tensor, Tensor], Tensor]  # rows [M, Z], local ids [M, 1] -> [M, Z]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """One rank among those of its replica."""

    mesh: Mesh
    seat: Seat
    tensor: Axis
    exchange: Exchange | None  # None: this rank holds every expert
    load: Tensor  # int64 [MoE layers, experts], rows of this lane since the start

    def experts(
        self, z: Tensor, ids: Tensor, weights: Tensor, keep: Tensor, compute: Compute
    ) -> Tensor:
        """`sum_e weights[e] * expert_e(z)` over experts that lie on any rank.

        The sum is taken here, in fp32 in ascending order of ids, so that it has the bits of a
        single rank's. Rows of other parts of the lane stay zero.

        Args:
            z: [N, Z].
            ids: int64 [N, k], ascending.
            weights: fp32 [N, k].
            keep: bool [N], false for padding.
            compute: this rank's experts on rows that came.

        Returns:
            [N, Z], same dtype.
        """
        assert self.exchange is not None
        rows = torch.arange(len(z), device=z.device)
        own = keep & (rows % self.mesh.parts == self.seat.part)
        arrived = self.exchange.dispatch(z, ids, own)
        out = arrived.rows
        if len(out):
            out = compute(out, arrived.local.unsqueeze(1))
        chosen = self.exchange.combine(out, arrived)
        total = weights[:, :1] * chosen[:, 0].float()
        for j in range(1, ids.shape[1]):
            total = total + weights[:, j : j + 1] * chosen[:, j].float()
        return total.to(z.dtype)

    def count(self, layer: int, ids: Tensor, keep: Tensor) -> None:
        """Note which experts a layer's rows chose; `layer` counts MoE layers."""
        real = keep.unsqueeze(1).expand(ids.shape).flatten().to(torch.int64)
        self.load[layer].scatter_add_(0, ids.flatten(), real)


def join(
    mesh: Mesh,
    rank: int,
    axes: dict[str, Axis],
    text: TextSpec,
    *,
    placement: Placement | None = None,
    exchange: str = "all_to_all",
    device: torch.device | str = "cpu",
) -> Team:
    """A rank's team.

    Args:
        mesh: the layout.
        rank: this process.
        axes: of `open_axes`.
        text: the whole model.
        placement: of experts over the shares; None spreads them evenly.
        exchange: its name in the settings.
        device: of the model.

    Raises:
        ConfigError: the model cannot be divided like this.
    """
    mesh.check(text)
    count, shares = text.moe.num_experts, mesh.expert
    table = routes(placement or even(count, shares), count, device)
    return Team(
        mesh=mesh,
        seat=mesh.seat(rank),
        tensor=axes["tensor"],
        exchange=open_exchange(exchange, axes["expert"], table) if shares > 1 else None,
        load=torch.zeros(len(text.moe_layers), count, dtype=torch.int64, device=device),
    )
