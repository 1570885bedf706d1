"""Page writes in torch."""

from __future__ import annotations

from torch import Tensor

from common.ops.plan import Chunks, Steps


def write_chunks(latent: Tensor, pages: Tensor, layer: int, plan: Chunks) -> None:
    """See `common.ops.paging.write_chunks`."""
    tokens = pages.shape[2]
    bounds, starts, lengths = plan.first.tolist(), plan.starts.tolist(), plan.lengths.tolist()
    for share, table in enumerate(plan.tables.tolist()):
        for chunk in range(bounds[share], bounds[share + 1]):
            page = table[starts[share] // tokens + chunk - bounds[share]]
            pages[page, layer, : lengths[chunk]] = latent[chunk, : lengths[chunk]]


def write_steps(latent: Tensor, pages: Tensor, layer: int, plan: Steps) -> None:
    """See `common.ops.paging.write_steps`."""
    rows, plan = plan.real()
    tokens = pages.shape[2]
    page = plan.tables.gather(1, (plan.starts // tokens).unsqueeze(1)).squeeze(1)
    pages[page, layer, plan.starts % tokens] = latent[rows]
