"""Tiles of grouped products, and which rows they are of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import BackendUnsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sizes of one grouped product's tiles; a block of an expert has up to `rows + tail` rows."""

    rows: int  # BM
    width: int  # BN
    depth: int  # BK
    stages: int
    warps: int
    tail: int = 0  # rows beyond `rows` for which weights are not unpacked again; bf16 products only
    registers: int | None = None  # of a thread at most
    sums: bool = True  # whether every `depth` is added in float32; for FP8 products


def fitted(tiling: Tiling, rows: int, depth: int) -> Tiling:
    """The tiling, narrowed where it does not divide a product of `rows` x `depth` weights.

    Raises:
        BackendUnsupported: a side is not a multiple of 128.
    """
    if rows % 128 or depth % 128:
        raise BackendUnsupported(
            f"the Triton experts multiply by weights of {rows} x {depth}; both must be multiples "
            "of 128: shard by another number of ranks, or use the reference"
        )
    width = tiling.width if rows % tiling.width == 0 else min(tiling.width, 128)
    step = tiling.depth if depth % tiling.depth == 0 else 128
    return dataclasses.replace(tiling, width=width, depth=step)


def group(ids: Tensor, num_experts: int, height: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort choices by expert and cut them into blocks of rows, without waiting for the device.

    Args:
        ids: int64 [N, k].
        num_experts: E.
        height: rows of a block.

    Returns:
        source int64 [N * k], the choice at each sorted place; expert of each block (num_experts for
        those not needed), the sorted place where it begins, and where each expert begins [E + 1].
    """
    flat = ids.flatten()
    ordered, source = flat.sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=ids.device))
    blocks = (offsets.diff() + height - 1) // height
    ends = blocks.cumsum(0)
    most = min(flat.numel(), num_experts) + flat.numel() // height
    number = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(ends, number, right=True)
    known = expert.clamp(max=num_experts - 1)
    begin = offsets[known] + (number - (ends - blocks)[known]) * height
    return source, expert, begin, offsets
