"""Where images lie among the rows of one pass of the tower: tables on its device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILE = 128  # rows of a block of queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """N rows of patches; images lie one after another, rows behind the last belong to none."""

    places: Tensor  # int64 [N, 2], column and row of each patch; 0 where there is none
    tiles: Tensor  # int64 [tiles, 3], first row of a block, its image's begin and end; -1 if none
    cells: Tensor  # int64 [N], rows in the order in which neighbours of a cell follow each other
