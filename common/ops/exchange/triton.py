"""The direct exchange in Triton: rows are stored into windows whose addresses are known.

Stores of one kernel are behind the flags of the next: a flag is released and acquired at system
scope. A rank sends a round only when its last one came back from all ranks, and a rank answers a
round after it read every row of it; so one window is enough, and no round overwrites another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.ops.exchange import Layout
from common.ops.quant.triton import KINDS

BLOCK = 1024  # values that one program moves


@triton.jit
def send_kernel(
    row_ptr, share_ptr, local_ptr, keep_ptr, window_ptr, rank, count,
    RANKS: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, Z: tl.constexpr,
    WANTED: tl.constexpr, INBOX: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid: (places, Z / BLOCK). Places from `count` on have no row."""
    place = tl.program_id(0)
    live = place < count
    row = place // TOP
    live = live & (tl.load(keep_ptr + row, mask=live, other=0) != 0)
    share = tl.load(share_ptr + place, mask=live, other=-1)
    if tl.program_id(1) == 0:
        local = tl.load(local_ptr + place, mask=live, other=-1)
        for rank_there in range(RANKS):
            window = tl.load(window_ptr + rank_there) + WANTED
            at = window.to(tl.pointer_type(tl.int32)) + (rank * PLACES + place)
            tl.store(at, tl.where(share == rank_there, local, -1).to(tl.int32))
    if live:
        z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(row_ptr + row.to(tl.int64) * Z + z, mask=z < Z)
        window = tl.multiple_of(tl.load(window_ptr + share) + INBOX, 16)  # for wide stores
        at = window.to(tl.pointer_type(DTYPE)) + (rank * PLACES + place).to(tl.int64) * Z
        tl.store(at + z, value, mask=z < Z)


@triton.jit
def answer_kernel(
    out_ptr, wanted_ptr, window_ptr,
    PLACES: tl.constexpr, Z: tl.constexpr, HOME: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid: (ranks * places, Z / BLOCK): outputs go to the places that their rows came from."""
    at = tl.program_id(0)
    if tl.load(wanted_ptr + at) >= 0:
        z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(out_ptr + at.to(tl.int64) * Z + z, mask=z < Z)
        window = tl.multiple_of(tl.load(window_ptr + at // PLACES) + HOME, 16)
        there = window.to(tl.pointer_type(DTYPE)) + (at % PLACES).to(tl.int64) * Z
        tl.store(there + z, value, mask=z < Z)


@triton.jit
def meet_kernel(window_ptr, round_ptr, rank, RANKS: tl.constexpr, PHASE: tl.constexpr):
    """Grid: 1. Raise this rank's flag in every window, then wait for every rank's in the own.

    Rounds are compared by their difference, for they pass 2^31 within days.
    """
    now = tl.load(round_ptr + PHASE) + 1
    for there in range(RANKS):
        flags = tl.load(window_ptr + there).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + PHASE * RANKS + rank, now, sem="release", scope="sys")
    own = tl.load(window_ptr + rank).to(tl.pointer_type(tl.int32)) + PHASE * RANKS
    for source in range(RANKS):
        while tl.atomic_add(own + source, 0, sem="acquire", scope="sys") - now < 0:
            pass
    tl.store(round_ptr + PHASE, now)


@triton.jit
def add_up_kernel(
    home_ptr, weight_ptr, keep_ptr, out_ptr, TOP: tl.constexpr, Z: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, Z / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(keep_ptr + row).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        value = tl.load(home_ptr + (row * TOP + j) * Z + z, mask=z < Z, other=0.0)
        total += tl.load(weight_ptr + row * TOP + j) * value.to(tl.float32)
    total = tl.where(kept > 0, total, 0.0)  # of a row that did not leave, what lies there is old
    tl.store(out_ptr + row * Z + z, total.to(out_ptr.dtype.element_ty), mask=z < Z)


def add_up(home: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    """Weighted sums of outputs by choice: home [places, Z], weights fp32 [N, k] -> [N, Z].

    Product and sum are two roundings, as in the definition: a fused one now and then turns the last
    bit of a bf16 sum, and that bit another layer's choice of experts.
    """
    count, width = len(weights), home.shape[1]
    out = home.new_empty(count, width)
    if count:
        add_up_kernel[(count, triton.cdiv(width, BLOCK))](
            home, weights, keep, out, TOP=weights.shape[1], Z=width, BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def send(
    rows: Tensor, share: Tensor, local: Tensor, keep: Tensor, windows: Tensor, rank: int,
    layout: Layout,
) -> None:  # fmt: skip
    """Store rows, and which expert each is for, into the windows of the ranks that have them.

    Args:
        rows: [N, Z], contiguous; N * k at most the layout's places.
        share: int64 [N, k], ranks. local: int64 [N, k], experts there.
        keep: bool [N]; other rows go nowhere.
        windows: int64 [ranks], addresses as this process sees them.
        rank: this one's position.
        layout: of every window.
    """
    top = share.shape[1]
    send_kernel[(layout.places, triton.cdiv(layout.width, BLOCK))](
        rows, share, local, keep, windows, rank, share.numel(),
        RANKS=layout.ranks, TOP=top, PLACES=layout.places, Z=layout.width, WANTED=layout.wanted,
        INBOX=layout.inbox, BLOCK=BLOCK, DTYPE=KINDS[layout.dtype],
    )  # fmt: skip


def answer(out: Tensor, wanted: Tensor, windows: Tensor, layout: Layout) -> None:
    """Store outputs [ranks * places, Z] at the places of the rows they were made of."""
    answer_kernel[(layout.ranks * layout.places, triton.cdiv(layout.width, BLOCK))](
        out, wanted, windows, PLACES=layout.places, Z=layout.width, HOME=layout.home, BLOCK=BLOCK,
        DTYPE=KINDS[layout.dtype],
    )  # fmt: skip


def meet(windows: Tensor, rounds: Tensor, rank: int, layout: Layout, *, phase: int) -> None:
    """Wait, on the device, until every rank has done its part of this round.

    Args:
        windows: as of `send`.
        rounds: int32 [2], of this rank; counts on with every call, captured or not.
        rank: this one's position.
        layout: of every window.
        phase: 0 after `send`, 1 after `answer`.
    """
    meet_kernel[(1,)](windows, rounds, rank, RANKS=layout.ranks, PHASE=phase, num_warps=1)
