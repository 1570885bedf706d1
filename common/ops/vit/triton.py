"""Rotation and attention of images' patches: each image within itself, any mix in one launch.

Which rows a block takes is read from a table on the device, so a captured launch serves any mix of
images that fits. Offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.vit.layout import TILE, Layout


@triton.jit
def rotate_kernel(
    x_ptr, x_row, place_ptr, cos_ptr, sin_ptr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, 2). Turn neighbouring pairs of a row's queries or keys, in place."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    x_at = x_ptr + row * x_row + which * (H * D) + at
    x = tl.load(x_at, mask=at < H * D, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2) % (D // 2)
    place = tl.load(place_ptr + row * 2 + pair % 2)  # even pairs by column, odd ones by row
    angle = place * (D // 4) + pair // 2
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BLOCK,))
    tl.store(x_at, turned.to(x_ptr.dtype.element_ty), mask=at < H * D)


@triton.jit
def _absorb(
    q, k_at, at, end, best, total, acc, scale,
    STEP: tl.constexpr, BN: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in BN keys and values; ENDS: some may lie behind the image's end."""
    if ENDS:
        live = at + tl.arange(0, BN) < end
        k = tl.load(k_at, mask=live[:, None], other=0.0)
        v = tl.load(k_at + STEP, mask=live[:, None], other=0.0)
    else:
        k, v = tl.load(k_at), tl.load(k_at + STEP)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if ENDS:
        score = tl.where(live[None, :], score, float("-inf"))
    peak = tl.maximum(best, tl.max(score, 1) * scale)
    shrink = tl.exp2(best - peak)
    part = tl.exp2(score * scale - peak[:, None])
    total = total * shrink + tl.sum(part, 1)
    acc = tl.dot(part.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def attend_kernel(
    x_ptr, x_row, out_ptr, tile_ptr, scale,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, tiles). A tile's queries over all keys of their image."""
    head, tile = tl.program_id(0), tl.program_id(1)
    start = tl.load(tile_ptr + tile * 3)
    begin, end = tl.load(tile_ptr + tile * 3 + 1), tl.load(tile_ptr + tile * 3 + 2)
    if start < 0:
        return
    row, lane = start + tl.arange(0, BM), tl.arange(0, D)
    base = x_ptr + head * D + lane[None, :]
    q = tl.load(base + row[:, None] * x_row, mask=row[:, None] < end, other=0.0)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    k_at = base + H * D + (begin + tl.arange(0, BN))[:, None] * x_row
    last = begin + (end - begin - 1) // BN * BN  # of 1 to BN keys; first, so that one loop is left
    best, total, acc = _absorb(
        q, k_at + (last - begin) * x_row, last, end, best, total, acc, scale, H * D, BN, True,
        PRECISION,
    )  # fmt: skip
    for at in tl.range(begin, last, BN, num_stages=STAGES):
        best, total, acc = _absorb(
            q, k_at, at, end, best, total, acc, scale, H * D, BN, False, PRECISION
        )
        k_at += BN * x_row
    out_at = out_ptr + row[:, None] * (H * D) + head * D + lane[None, :]
    out = acc / total[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row[:, None] < end)


def rotate(qkv: Tensor, layout: Layout, cos: Tensor, sin: Tensor) -> None:
    """See `common.ops.vit.rotate`."""
    rows, _, heads, dim = qkv.shape
    rotate_kernel[(rows, 2)](
        qkv, qkv.stride(0), layout.places, cos, sin, H=heads, D=dim,
        BLOCK=triton.next_power_of_2(heads * dim),
    )  # fmt: skip


def attend(
    qkv: Tensor, layout: Layout, *, keys: int = 64, stages: int = 3, num_warps: int = 8
) -> Tensor:
    """See `common.ops.vit.attend`; rows of no image are left unwritten."""
    rows, _, heads, dim = qkv.shape
    out = torch.empty((rows, heads * dim), dtype=qkv.dtype, device=qkv.device)
    attend_kernel[(heads, layout.tiles.shape[0])](
        qkv, qkv.stride(0), out, layout.tiles, dim**-0.5 * 1.4426950408889634,
        H=heads, D=dim, BM=TILE, BN=keys, STAGES=stages,
        PRECISION="tf32" if qkv.dtype == torch.bfloat16 else "ieee", num_warps=num_warps,
    )  # fmt: skip
    return out
