"""Sort a step's choices by expert in two launches: what `group` does in some twenty.

Every expert has a program, which looks at all choices: cheap as long as they are few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 4096  # choices; more are sorted by the library


@triton.jit
def sort_kernel(
    id_ptr, source_ptr, offset_ptr, count, E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: experts + 1; the last one has no choices and tells where they end."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    ids = tl.load(id_ptr + at, mask=at < count, other=E)
    before = tl.sum((ids < expert).to(tl.int32), 0)
    tl.store(offset_ptr + expert, before.to(tl.int64))
    mine = (ids == expert) & (at < count)
    place = before + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(source_ptr + place, at.to(tl.int64), mask=mine)


@triton.jit
def cut_kernel(
    offset_ptr, expert_ptr, begin_ptr, most, HEIGHT: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows / BLOCK."""
    e = tl.arange(0, WIDE)
    known = e < E
    first = tl.load(offset_ptr + e, mask=known, other=0).to(tl.int32)
    after = tl.load(offset_ptr + e + 1, mask=known, other=0).to(tl.int32)
    blocks = tl.where(known, (after - first + HEIGHT - 1) // HEIGHT, 0)
    ends = tl.cumsum(blocks, 0)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    past = (ends[None, :] <= number[:, None]) & known[None, :]
    expert = tl.sum(past.to(tl.int32), 1)
    own = e[None, :] == expert[:, None]
    begin = tl.sum(tl.where(own, (first - (ends - blocks) * HEIGHT)[None, :], 0), 1)
    live = number < most
    tl.store(expert_ptr + number, expert.to(tl.int64), mask=live)
    tl.store(begin_ptr + number, (begin + number * HEIGHT).to(tl.int64), mask=live)


def group_few(ids: Tensor, num_experts: int, height: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `group`, of at most `MOST` choices; the place of a block not needed means nothing."""
    count = ids.numel()
    most = min(count, num_experts) + count // height
    source, offsets, expert, begin = (
        torch.empty(size, dtype=torch.int64, device=ids.device)
        for size in (count, num_experts + 1, most, most)
    )
    sort_kernel[(num_experts + 1,)](
        ids, source, offsets, count, E=num_experts,
        BLOCK=max(16, triton.next_power_of_2(count)), num_warps=4,
    )  # fmt: skip
    block = 16
    cut_kernel[(triton.cdiv(most, block),)](
        offsets, expert, begin, most, HEIGHT=height, E=num_experts,
        WIDE=triton.next_power_of_2(num_experts), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return source, expert, begin, offsets
