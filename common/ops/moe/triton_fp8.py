"""What stands around FP8 grouped products: rows to FP8, SiTU and FP8 again, the weighted sum.

A row's 128 neighbours share a scale, the largest magnitude over 448. The scales of a table of rows
are stored column by column, as the products read them. Offsets are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.act.triton import situ

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
SMALLEST = tl.constexpr(1e-30)  # a scale is never zero


@triton.jit
def _store(value, q_ptr, scale_ptr, row, room, K: tl.constexpr, G: tl.constexpr):
    """[G, 128] values of a row as FP8, in groups of 128; scales are [tables, K / 128, room]."""
    group = tl.arange(0, G)
    largest = tl.maximum(tl.max(tl.abs(value), 1), SMALLEST)
    scale = largest / LARGEST
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    narrow = (value * (1.0 / scale)[:, None]).to(tl.float8e4nv)
    tl.store(q_ptr + row * K + at, narrow, mask=at < K)
    scale_at = (row // room * (K // 128) + group) * room + row % room
    tl.store(scale_ptr + scale_at, scale, mask=group * 128 < K)


@triton.jit
def gather_kernel(
    x_ptr, x_row, place_ptr, q_ptr, scale_ptr, room, top,
    K: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid: choices. A choice's row, in FP8, at its place."""
    choice = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, G)[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + (choice // top) * x_row + at, mask=at < K, other=0.0).to(tl.float32)
    row = tl.load(place_ptr + choice)
    _store(x, q_ptr, scale_ptr, row, room, K, G)


@triton.jit
def activate_kernel(
    x_ptr, place_ptr, q_ptr, scale_ptr, room, beta: tl.constexpr, linear_beta: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, SITU: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid: choices. [gate | up] of the first product to the second one's FP8 operand."""
    row = tl.load(place_ptr + tl.program_id(0))
    at = tl.arange(0, G)[:, None] * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(x_ptr + row * 2 * K + at, mask=at < K, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * K + K + at, mask=at < K, other=0.0).to(tl.float32)
    if SITU:
        out = situ(gate, up, beta, linear_beta, FAST)
    else:
        out = gate * tl.sigmoid(gate) * up
    _store(out, q_ptr, scale_ptr, row, room, K, G)


@triton.jit
def sum_kernel(
    x_ptr, place_ptr, weight_ptr, out_ptr, TOP: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, Z / BLOCK). The weighted sum over a row's choices, in their order."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        place = tl.load(place_ptr + row * TOP + j)
        value = tl.load(x_ptr + place * Z + at, mask=at < Z, other=0.0)
        total += tl.load(weight_ptr + row * TOP + j) * value.to(tl.float32)
    tl.store(out_ptr + row * Z + at, total.to(out_ptr.dtype.element_ty), mask=at < Z)
