"""Row-tiled products in torch. A batched product runs one problem of fixed shape per tile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """See `common.ops.rows.linear`."""
    if tile is None:
        return functional.linear(x, weight)
    tiles, rows = _tiles(x, tile)
    out = torch.bmm(tiles, weight.t().expand(len(tiles), -1, -1))  # [N / tile, tile, O]
    return out.view(-1, len(weight))[:rows]


def heads(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """See `common.ops.rows.heads`."""
    num_heads, _, width = weight.shape
    if tile is None:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    tiles, rows = _tiles(x, tile)
    left = tiles.transpose(1, 2).reshape(len(tiles) * num_heads, tile, -1)
    right = weight.expand(len(tiles), -1, -1, -1).reshape(len(tiles) * num_heads, -1, width)
    out = torch.bmm(left, right).view(len(tiles), num_heads, tile, width)
    return out.transpose(1, 2).reshape(-1, num_heads, width)[:rows]


def _tiles(x: Tensor, tile: int) -> tuple[Tensor, int]:
    """Rows [N, ...] zero-padded and cut to [N / tile, tile, ...], and N."""
    rows = x.shape[0]
    missing = -rows % tile
    if missing:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    return x.reshape(-1, tile, *x.shape[1:]), rows
