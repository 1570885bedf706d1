"""KDA's short convolution over chunks, and the windows it leaves behind.

Every row reads its three predecessors: from the rows before it, or, at the head of a share, from
the slot's window. The windows are rolled on by a second launch, after all of them were read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import BackendUnsupported
from common.ops.plan import Chunks


@triton.jit
def _row(raw_ptr, raw_row, window_ptr, row, at, live, D: tl.constexpr, INNER: tl.constexpr):
    """Raw row `row` of a share, [BLOCK]; rows -3 to -1 lie in the window, oldest first."""
    if row >= 0:
        value = tl.load(raw_ptr + row * raw_row + at, mask=live, other=0.0)
    else:
        old = window_ptr + (at % INNER // D) * (9 * D) + (at // INNER) * D + at % D
        value = tl.load(old + (3 + row) * (3 * D), mask=live, other=0.0)
    return value


@triton.jit
def conv_kernel(
    raw_ptr, raw_row, weight_ptr, pool_ptr, pool_slot, out_ptr, slot_ptr, first_ptr,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (channels / BLOCK, chunks * 64 / ROWS); each row is loaded once and handed on."""
    inner: tl.constexpr = H * D
    begin = tl.program_id(1).to(tl.int64) * ROWS
    share = 0
    while tl.load(first_ptr + share + 1) * 64 <= begin:
        share += 1
    base = tl.load(first_ptr + share).to(tl.int64) * 64
    slot = tl.load(slot_ptr + share).to(tl.int64)
    row = begin - base
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < 3 * inner
    raw_ptr += base * raw_row
    window = pool_ptr + slot * pool_slot
    w0 = tl.load(weight_ptr + at, mask=live, other=0.0)
    w1 = tl.load(weight_ptr + 3 * inner + at, mask=live, other=0.0)
    w2 = tl.load(weight_ptr + 6 * inner + at, mask=live, other=0.0)
    w3 = tl.load(weight_ptr + 9 * inner + at, mask=live, other=0.0)
    a = _row(raw_ptr, raw_row, window, row - 3, at, live, D, inner).to(tl.float32)
    b = _row(raw_ptr, raw_row, window, row - 2, at, live, D, inner).to(tl.float32)
    c = _row(raw_ptr, raw_row, window, row - 1, at, live, D, inner).to(tl.float32)
    out_at = out_ptr + begin * (3 * inner) + at
    for i in tl.static_range(ROWS):
        now = tl.load(raw_ptr + (row + i) * raw_row + at, mask=live, other=0.0).to(tl.float32)
        mixed = a * w0 + b * w1 + c * w2 + now * w3
        out = mixed * tl.sigmoid(mixed)
        tl.store(out_at + i * (3 * inner), out.to(out_ptr.dtype.element_ty), mask=live)
        a = b
        b = c
        c = now


@triton.jit
def roll_kernel(
    raw_ptr, raw_row, pool_ptr, pool_slot, slot_ptr, first_ptr, length_ptr,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (shares, channels / BLOCK)."""
    inner: tl.constexpr = H * D
    share = tl.program_id(0)
    base = tl.load(first_ptr + share).to(tl.int64) * 64
    last = tl.load(first_ptr + share + 1).to(tl.int64) - 1
    tokens = last * 64 - base + tl.load(length_ptr + last)
    slot = tl.load(slot_ptr + share).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < 3 * inner
    window = pool_ptr + slot * pool_slot
    old = window + (at % inner // D) * (9 * D) + (at // inner) * D + at % D
    raw_ptr += base * raw_row
    a = _row(raw_ptr, raw_row, window, tokens - 3, at, live, D, inner)
    b = _row(raw_ptr, raw_row, window, tokens - 2, at, live, D, inner)
    c = _row(raw_ptr, raw_row, window, tokens - 1, at, live, D, inner)
    tl.debug_barrier()  # a short share keeps rows of its old window: read before writing
    tl.store(old, a, mask=live)
    tl.store(old + 3 * D, b, mask=live)
    tl.store(old + 6 * D, c, mask=live)


def conv_chunks(
    raw: Tensor, weight: Tensor, pool: Tensor, layer: int, plan: Chunks, *, rows: int = 8
) -> Tensor:  # fmt: skip
    """See `common.ops.conv.conv_chunks`; four taps only."""
    chunks, _, _, heads, dim = raw.shape
    if weight.shape[0] != 4:
        raise BackendUnsupported(
            f"the Triton convolution has 4 taps, not {weight.shape[0]}; use the reference"
        )
    out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    view, shares = pool[:, layer], plan.slots.shape[0]
    block = min(1024, triton.next_power_of_2(3 * heads * dim))
    across = triton.cdiv(3 * heads * dim, block)
    conv_kernel[(across, chunks * 64 // rows)](
        raw, raw.stride(1), weight, view, view.stride(0), out, plan.slots, plan.first,
        H=heads, D=dim, BLOCK=block, ROWS=rows, num_warps=4,
    )  # fmt: skip
    roll_kernel[(shares, across)](
        raw, raw.stride(1), view, view.stride(0), plan.slots, plan.first, plan.lengths,
        H=heads, D=dim, BLOCK=block,
    )  # fmt: skip
    return out
