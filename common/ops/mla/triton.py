"""Latent attention of one token a share, in the absorbed form, straight from the pages.

Every program takes one group of heads over one part of a share's pages; a second launch joins the
parts. The latent is key and value at once, so a page is read once for each group of heads. Page
offsets are 64-bit. Entries at and beyond a share's length are masked, whatever they hold. Padding
has the length 0 and gets zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.plan import Steps
from common.ops.rows.triton import heads as rows_of_heads

FIXED_PARTS, FIXED_PAGES = 32, 16  # of a share where its bits must not depend on its neighbours
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def mla_part_kernel(
    q_ptr, page_ptr, page_stride, table_ptr, table_row, start_ptr, part_ptr, mass_ptr, scale,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BH: tl.constexpr,
    PARTS: tl.constexpr, CUTS: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of heads, parts, shares); a part is a share's pages over CUTS, or LEAST."""
    share = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    known = head < H
    length = tl.load(start_ptr + share) + 1
    pages = tl.cdiv(length, T)
    each = tl.maximum(tl.cdiv(pages, CUTS), LEAST)
    begin = part * each
    end = tl.minimum(begin + each, pages)
    rank = tl.arange(0, R)
    rest = R + tl.arange(0, P)
    token = tl.arange(0, T)
    q_at = q_ptr + (share * H + head)[:, None] * (R + P)
    q = tl.load(q_at + rank[None, :], mask=known[:, None], other=0.0)
    q_rest = tl.load(q_at + rest[None, :], mask=known[:, None], other=0.0)
    best = tl.full([BH], float("-inf"), tl.float32)
    mass = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, R], tl.float32)
    for page in tl.range(begin, end, num_stages=STAGES):
        number = tl.load(table_ptr + share * table_row + page).to(tl.int64)
        live = page * T + token < length
        entry = page_ptr + number * page_stride + token[:, None] * (R + P)
        latent = tl.load(entry + rank[None, :], mask=live[:, None], other=0.0)
        shared = tl.load(entry + rest[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        score = tl.dot(q_rest, tl.trans(shared), score, input_precision=PRECISION)
        score = tl.where(live[None, :], score * (scale * LOG2E), float("-inf"))
        new = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new[:, None])
        fade = tl.exp2(best - new)
        mass = mass * fade + tl.sum(weight, 1)
        acc = tl.dot(
            weight.to(latent.dtype), latent, acc * fade[:, None], input_precision=PRECISION
        )
        best = new
    place = (share * PARTS + part) * H + head
    total = tl.where(mass > 0, best + tl.log2(mass), float("-inf"))
    tl.store(mass_ptr + place, total, mask=known)
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    if begin < end:
        tl.store(part_ptr + place[:, None] * R + rank[None, :], acc, mask=known[:, None])


@triton.jit
def mla_join_kernel(
    part_ptr, mass_ptr, out_ptr, H: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr
):
    """Grid: (heads, shares)."""
    head = tl.program_id(0)
    share = tl.program_id(1).to(tl.int64)
    rank = tl.arange(0, R)
    best = float("-inf")
    for part in tl.static_range(PARTS):
        best = tl.maximum(best, tl.load(mass_ptr + (share * PARTS + part) * H + head))
    best = tl.where(best == float("-inf"), 0.0, best)  # of padding, which has no part
    total = 0.0
    acc = tl.zeros([R], tl.float32)
    for part in tl.static_range(PARTS):
        place = (share * PARTS + part) * H + head
        weight = tl.exp2(tl.load(mass_ptr + place) - best)
        total += weight
        live = rank < tl.where(weight != 0, R, 0)  # an empty part was not written
        acc += weight * tl.load(part_ptr + place * R + rank, mask=live, other=0.0)
    acc = acc / tl.where(total != 0, total, 1.0)
    tl.store(out_ptr + (share * H + head) * R + rank, acc.to(out_ptr.dtype.element_ty))


def attend_steps(
    q: Tensor, pages: Tensor, layer: int, kv_b: Tensor, scale: float, plan: Steps, tile: int | None
) -> Tensor:  # fmt: skip
    """See `common.ops.mla.attend_steps`."""
    rank = kv_b.shape[2]
    nope = q.shape[2] - pages.shape[3] + rank
    absorbed = torch.cat([rows_of_heads(q[..., :nope], kv_b[:, :nope], tile), q[..., nope:]], -1)
    latents = attend_latents(absorbed, pages[:, layer], rank, scale, plan, fixed=tile is not None)
    return rows_of_heads(latents, kv_b[:, nope:].transpose(1, 2), tile)


def attend_latents(
    q: Tensor, pages: Tensor, rank: int, scale: float, plan: Steps, *, group: int | None = None,
    parts: int | None = None, stages: int = 2, num_warps: int | None = None,
    precision: str | None = None, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """The attention itself.

    Args:
        q: absorbed queries [B, H, rank + rope], contiguous.
        pages: one layer's view of the pool, [pages, 64, rank + rope].
        rank: values of a latent.
        scale: of the scores.
        plan: where the rows belong.
        fixed: let a share's own length alone decide how it is divided.

    Returns:
        Weighted latents [B, H, rank], dtype of q.
    """
    batch, num_heads, width = q.shape
    precision = precision or ("tf32" if q.dtype == torch.bfloat16 else "ieee")
    group = group or (16 if num_heads <= 16 else 64)
    warps = num_warps or (8 if group == 64 else 4)
    groups = triton.cdiv(num_heads, group)
    cuts, least = 0, 1
    if fixed:
        cuts, least = FIXED_PARTS, FIXED_PAGES
        parts = max(1, min(cuts, triton.cdiv(plan.tables.shape[1], least)))
    elif parts is None:
        parts = max(1, min(64, plan.tables.shape[1], 264 // max(1, batch * groups)))
    out = torch.empty((batch, num_heads, rank), dtype=q.dtype, device=q.device)
    if not batch:
        return out
    part = torch.empty((batch, parts, num_heads, rank), dtype=torch.float32, device=q.device)
    mass = torch.empty((batch, parts, num_heads), dtype=torch.float32, device=q.device)
    mla_part_kernel[(groups, parts, batch)](
        q, pages, pages.stride(0), plan.tables, plan.tables.stride(0), plan.starts, part, mass,
        scale,
        H=num_heads, R=rank, P=width - rank, T=pages.shape[1], BH=group, PARTS=parts,
        CUTS=cuts or parts, LEAST=least, STAGES=stages, PRECISION=precision, num_warps=warps,
    )  # fmt: skip
    mla_join_kernel[(num_heads, batch)](part, mass, out, H=num_heads, R=rank, PARTS=parts)
    return out
