"""Between Baton's rows and a library's exchange, in Triton; see `packing.py`.

Nothing waits for the host, and shapes depend on the batch alone: a captured pass holds all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.exchange.packing import Packing

BLOCK = 1024  # values that one program moves


@triton.jit
def leave_kernel(
    row_ptr, share_ptr, local_ptr, keep_ptr, out_ptr, id_ptr,
    TOP: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, EACH2: tl.constexpr,
    EXPERTS: tl.constexpr, Z: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows * PARTS, Z / BLOCK). Values beyond Z mean nothing to anybody."""
    part = tl.program_id(0).to(tl.int64)
    row = part // PARTS
    z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + part * WIDE + z, tl.load(row_ptr + row * Z + z, mask=z < Z), mask=z < Z)
    if tl.program_id(1) == 0:
        j = tl.arange(0, EACH2)
        choice = (part % PARTS) * EACH + j
        live = (j < EACH) & (choice < TOP) & (tl.load(keep_ptr + row).to(tl.int32) != 0)
        share = tl.load(share_ptr + row * TOP + choice, mask=live, other=0)
        local = tl.load(local_ptr + row * TOP + choice, mask=live, other=0)
        chosen = tl.where(live, share * EXPERTS + local, -1).to(tl.int32)
        tl.store(id_ptr + part * EACH + j, chosen, mask=j < EACH)


@triton.jit
def unpack_kernel(
    came_ptr, count_ptr, row_ptr, local_ptr, place_ptr,
    EXPERTS: tl.constexpr, EXPERTS2: tl.constexpr, SLOTS: tl.constexpr, Z: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (places, Z / BLOCK). Rows of the experts one after another, without gaps."""
    at = tl.program_id(0)
    e = tl.arange(0, EXPERTS2)
    counts = tl.load(count_ptr + e, mask=e < EXPERTS, other=0)
    ends = tl.cumsum(counts, 0)
    expert = tl.sum(((ends <= at) & (e < EXPERTS)).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, counts, 0), 0)
    live = expert < EXPERTS
    place = expert * SLOTS + at - before
    if tl.program_id(1) == 0:
        tl.store(local_ptr + at, expert.to(tl.int64))  # beyond all experts: no row
        tl.store(place_ptr + at, tl.where(live, place, -1).to(tl.int32))
    if live:
        z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(came_ptr + place.to(tl.int64) * WIDE + z, mask=z < Z)
        tl.store(row_ptr + at.to(tl.int64) * Z + z, value, mask=z < Z)


@triton.jit
def pack_kernel(
    out_ptr, place_ptr, came_ptr, Z: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (places, Z / BLOCK). Outputs go where their rows lay."""
    at = tl.program_id(0)
    place = tl.load(place_ptr + at).to(tl.int64)
    if place >= 0:
        z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(out_ptr + at.to(tl.int64) * Z + z, mask=z < Z)
        tl.store(came_ptr + place * WIDE + z, value, mask=z < Z)


@triton.jit
def add_up_kernel(
    home_ptr, id_ptr, weight_ptr, silent_ptr, out_ptr,
    RANKS: tl.constexpr, RANKS2: tl.constexpr, TOP: tl.constexpr, PARTS: tl.constexpr,
    EACH: tl.constexpr, CAP: tl.constexpr, STRIDE: tl.constexpr, Z: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, Z / BLOCK). NaN everywhere where a rank fell silent."""
    row = tl.program_id(0).to(tl.int64)
    z = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANKS2)
    silent = tl.sum(tl.load(silent_ptr + r, mask=r < RANKS, other=0), 0)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        part = row * PARTS + j // EACH
        chosen = tl.load(id_ptr + part * EACH + j % EACH).to(tl.int64)
        at = home_ptr + (chosen * CAP + part) * STRIDE + z
        value = tl.load(at, mask=(z < Z) & (chosen >= 0), other=0.0)
        total += tl.load(weight_ptr + row * TOP + j) * value.to(tl.float32)
    total = tl.where(silent != 0, float("nan"), total)
    tl.store(out_ptr + row * Z + z, total.to(out_ptr.dtype.element_ty), mask=z < Z)


def leave(
    rows: Tensor, share: Tensor, local: Tensor, keep: Tensor, p: Packing
) -> tuple[Tensor, Tensor]:
    """What the library is to send.

    Args:
        rows: [N, Z], contiguous.
        share: int64 [N, k], ranks. local: int64 [N, k], places there.
        keep: bool [N]; other rows choose nothing.
        p: the sizes.

    Returns:
        [N * parts, wide], and int32 [N * parts, each]: rank * experts + place, -1 for none.
    """
    count = len(rows) * p.parts
    out = rows.new_empty(count, p.wide)
    ids = torch.empty(count, p.each, dtype=torch.int32, device=rows.device)
    if count:
        leave_kernel[(count, triton.cdiv(p.width, BLOCK))](
            rows, share, local, keep, out, ids, TOP=p.top, PARTS=p.parts, EACH=p.each,
            EACH2=triton.next_power_of_2(p.each), EXPERTS=p.experts, Z=p.width, WIDE=p.wide,
            BLOCK=BLOCK,
        )  # fmt: skip
    return out, ids


def unpack(came: Tensor, counts: Tensor, p: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """What arrived, without the gaps between experts.

    Args:
        came: [experts, slots, wide], of each expert its rows first.
        counts: int32 [experts].
        p: the sizes.

    Returns:
        Rows [places, Z], their places among this rank's experts int64 [places] (`experts` where
        there is no row), and where they lay, int32 [places] (-1: no row).
    """
    rows = came.new_empty(p.places, p.width)
    local = torch.empty(p.places, dtype=torch.int64, device=came.device)
    place = torch.empty(p.places, dtype=torch.int32, device=came.device)
    unpack_kernel[(p.places, triton.cdiv(p.width, BLOCK))](
        came, counts, rows, local, place, EXPERTS=p.experts,
        EXPERTS2=triton.next_power_of_2(p.experts), SLOTS=p.slots, Z=p.width, WIDE=p.wide,
        BLOCK=BLOCK,
    )  # fmt: skip
    return rows, local, place


def pack(out: Tensor, place: Tensor, came: Tensor, p: Packing) -> None:
    """Put outputs [places, Z] into `came`, each where its row lay (see `unpack`)."""
    pack_kernel[(p.places, triton.cdiv(p.width, BLOCK))](
        out, place, came, Z=p.width, WIDE=p.wide, BLOCK=BLOCK
    )


def add_up(home: Tensor, chosen: Tensor, weights: Tensor, silent: Tensor, p: Packing) -> Tensor:
    """Weighted sums of the outputs that came back.

    Product and sum are two roundings, as in the definition.

    Args:
        home: [returns, stride], an output at [expert * cap + row that left].
        chosen: int32 [N * parts, each], of `leave`.
        weights: fp32 [N, k], contiguous.
        silent: int32 [ranks], not zero for a rank that did not answer in time.
        p: the sizes.

    Returns:
        [N, Z], added in fp32 in order and rounded once; zero where a row was not kept, NaN where
        any rank fell silent.
    """
    count = len(weights)
    out = home.new_empty(count, p.width)
    if count:
        add_up_kernel[(count, triton.cdiv(p.width, BLOCK))](
            home, chosen, weights, silent, out, RANKS=p.ranks,
            RANKS2=triton.next_power_of_2(p.ranks), TOP=p.top, PARTS=p.parts, EACH=p.each,
            CAP=p.cap, STRIDE=p.stride, Z=p.width, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return out
