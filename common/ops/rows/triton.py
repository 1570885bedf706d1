"""Matrix products in fixed tiles: a row's bits depend on that row and the weights alone.

The number of rows changes only how many programs there are: a program always takes the same count
of rows (absent ones are zeros) and walks down the inputs in the same steps; the weights' shape says
how many programs share the inputs of one output. Partial sums are added in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

FEW = 256  # rows up to which fp32 weights are multiplied here faster than by the library
MANY = 2048  # rows from which on taller tiles of its parts keep a device busy
PART_DEPTH = 64  # inputs that the matrix unit adds up where fp32 is wanted
WIDE = 64  # rows from which on a pass is a prompt's: larger tiles, no parts
ENOUGH = 200  # programs that keep a device busy
MOST_PARTS = 16
LEAST_DEPTH = 512  # inputs of a part that pay for adding it up


@triton.jit
def rows_kernel(
    x_ptr, x_row, x_batch, w_ptr, w_out, w_in, w_batch, out_ptr, out_part, out_row, out_batch,
    rows, outputs, inputs, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (rows / BM, outputs / BN * PARTS, batches)."""
    batch = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1) % PARTS
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    out = (tl.program_id(1) // PARTS) * BN + tl.arange(0, BN)
    known, live = out < outputs, row < rows
    k = tl.arange(0, BK)
    x_at = x_ptr + batch * x_batch + row.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w_ptr + batch * w_batch + out.to(tl.int64)[:, None] * w_out + k[None, :] * w_in
    steps = tl.cdiv(inputs, BK)
    each = tl.cdiv(steps, PARTS)
    acc = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(part * each, tl.minimum(part * each + each, steps), num_stages=STAGES):
        at = step * BK
        if EVEN:
            w = tl.load(w_at + at.to(tl.int64) * w_in, mask=known[:, None], other=0.0)
            x = tl.load(x_at + at, mask=live[:, None], other=0.0)
        else:
            inside = (at + k < inputs)[None, :]
            w = tl.load(w_at + at.to(tl.int64) * w_in, mask=known[:, None] & inside, other=0.0)
            x = tl.load(x_at + at, mask=live[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x.to(w.dtype)), acc, input_precision=PRECISION)
    place = out_ptr + part.to(tl.int64) * out_part + batch * out_batch
    place = place + row.to(tl.int64)[None, :] * out_row + out[:, None]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=known[:, None] & live[None, :])


@triton.jit
def _upper(x):
    """A float32's first eight bits, which bf16 holds; what is left has the other sixteen."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def parts_kernel(
    x_ptr, x_row, w_ptr, w_row, out_ptr, rows, outputs, inputs, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows / BM, outputs / BN). bf16 inputs by fp32 weights: three products with the
    weights' three bf16 parts, which hold all of their bits. The matrix unit cuts its sums off
    where float32 would round them, so it adds up no more than `BK` inputs.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    known, live = out < outputs, row < rows
    k = tl.arange(0, BK)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w_ptr + out.to(tl.int64)[:, None] * w_row + k[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for _ in tl.range(0, inputs // BK, num_stages=STAGES):
        x = tl.trans(tl.load(x_at, mask=live[:, None], other=0.0)).to(DTYPE)
        w = tl.load(w_at, mask=known[:, None], other=0.0)
        high = _upper(w)
        middle = _upper(w - high)
        low = (w - high) - middle
        part = tl.dot(low.to(DTYPE), x)
        part = tl.dot(middle.to(DTYPE), x, part)
        acc += tl.dot(high.to(DTYPE), x, part)
        x_at += BK
        w_at += BK
    place = out_ptr + row.to(tl.int64)[None, :] * outputs + out[:, None]
    tl.store(place, acc, mask=known[:, None] & live[None, :])


@triton.jit
def sum_kernel(part_ptr, stride, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: count / BLOCK; parts are added in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(part_ptr + at, mask=at < count, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_ptr + part * stride + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < count)


def linear(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """See `common.ops.rows.linear`; without a tile the library multiplies."""
    if tile is None:
        return functional.linear(x, weight)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(x.unsqueeze(1), weight.t().unsqueeze(0), tile, out.unsqueeze(1))
    return out


def widened(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """See `common.ops.rows.widened`; many rows without a tile go by the weights' parts, or are the
    library's.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    if tile is None and x.shape[0] > FEW:
        if _has_parts(x, weight):
            return in_parts(x, weight, out)
        return functional.linear(x.float(), weight)
    _multiply(x.unsqueeze(1), weight.t().unsqueeze(0), tile or 1, out.unsqueeze(1))
    return out


def _has_parts(x: Tensor, weight: Tensor) -> bool:
    is_dense = x.stride(1) == 1 and weight.stride(1) == 1
    return x.dtype == torch.bfloat16 and is_dense and x.shape[1] % PART_DEPTH == 0


def in_parts(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """bf16 x [N, K] by fp32 weight [O, K], rows of neighbours, K a multiple of `PART_DEPTH`; as
    accurate as a product in fp32, three times as fast.
    """
    rows, outputs = out.shape
    high, wide = (128, 64) if rows >= MANY else (64, 64)
    parts_kernel[(triton.cdiv(rows, high), triton.cdiv(outputs, wide))](
        x, x.stride(0), weight, weight.stride(0), out, rows, outputs, x.shape[1],
        BM=high, BN=wide, BK=PART_DEPTH, STAGES=3,
        DTYPE=tl.bfloat16 if x.is_cuda else tl.float32, num_warps=4,
    )  # fmt: skip
    return out


def heads(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """See `common.ops.rows.heads`; without a tile the library multiplies."""
    if tile is None:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    shape = (x.shape[0], weight.shape[0], weight.shape[2])
    return _multiply(x, weight, tile, torch.empty(shape, dtype=x.dtype, device=x.device))


def parts_of(outputs: int, inputs: int, batches: int) -> int:
    """Programs that share the inputs of one output, by the weights' shape alone."""
    parts, tiles = 1, triton.cdiv(outputs, 64) * batches
    while parts < MOST_PARTS and tiles * parts < ENOUGH and inputs >= LEAST_DEPTH * parts:
        parts *= 2
    return parts


def _multiply(
    x: Tensor, weight: Tensor, tile: int, out: Tensor, *, parts: int | None = None,
    across: int | None = None, depth: int | None = None, stages: int | None = None,
) -> Tensor:  # fmt: skip
    """x [N, H, K], weight [H, K, O] of any strides -> out [N, H, O], contiguous."""
    rows, batches, inputs = x.shape
    outputs = weight.shape[2]
    if not rows:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    half = weight.dtype == torch.bfloat16
    wide = tile >= WIDE
    across = across or (128 if wide and half else 64)
    depth = depth or (64 if wide or not half else 128)
    parts = parts or (1 if wide else parts_of(outputs, inputs, batches))
    target = out
    if parts > 1:
        target = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, across), triton.cdiv(outputs, across) * parts, batches)
    rows_kernel[grid](
        x, x.stride(0), x.stride(1), weight, weight.stride(2), weight.stride(1), weight.stride(0),
        target, out.numel(), out.stride(0), out.stride(1), rows, outputs, inputs,
        PARTS=parts, BM=across, BN=across, BK=depth, EVEN=inputs % depth == 0,
        STAGES=stages or (4 if half else 3), PRECISION="tf32" if half else "tf32x3",
        num_warps=8 if across == 128 else 4,
    )  # fmt: skip
    if parts > 1:
        sum_kernel[(triton.cdiv(out.numel(), 1024),)](
            target, out.numel(), out, out.numel(), PARTS=parts, BLOCK=1024
        )
    return out
