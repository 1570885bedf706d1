"""The attention-residual mixture, its norm and the pending add in one launch.

One program owns one token. The softmax over sources is kept as a running maximum, so a source is
read once and forgotten; the next ones are on their way while it is reduced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _mark(v, score, eps, D: tl.constexpr):
    """A source's score: both sums in one reduction."""
    dot, square = tl.reduce((v * score, v * v), 0, _add)
    return dot * tl.rsqrt(square / D + eps)


@triton.jit
def _take(mix, total, best, v, score, eps, D: tl.constexpr):
    """Add one source to a mixture whose weights are relative to the best mark so far."""
    mark = _mark(v, score, eps, D)
    new = tl.maximum(best, mark)
    keep = tl.exp2((best - new) * LOG2E)
    weight = tl.exp2((mark - new) * LOG2E)
    return mix * keep + v * weight, total * keep + weight, new


@triton.jit
def attnres_kernel(
    prefix_ptr, prefix_row, pending_ptr, pending_row, bank_ptr, bank_token, bank_row, score_ptr,
    norm_ptr, out_ptr, sum_ptr, write_row, eps,
    READABLE: tl.constexpr, PENDING: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < D
    bank = bank_ptr + token * bank_token + at
    p = tl.load(prefix_ptr + token * prefix_row + at, mask=live, other=0.0)
    kind = p.dtype
    one = p
    two = p
    if READABLE == 1 or READABLE == 2:  # few enough to be asked for before the first is reduced
        one = tl.load(bank, mask=live, other=0.0)
        if READABLE == 2:
            two = tl.load(bank + bank_row, mask=live, other=0.0)
    if PENDING:
        more = tl.load(pending_ptr + token * pending_row + at, mask=live, other=0.0)
        p = (p.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(sum_ptr + token * D + at, p, mask=live)
    score = tl.load(score_ptr + at, mask=live, other=0.0)
    mix = p.to(tl.float32)
    if READABLE > 0:
        best = _mark(mix, score, eps, D)
        total = 1.0
        if READABLE <= 2:
            mix, total, best = _take(mix, total, best, one.to(tl.float32), score, eps, D)
            if READABLE == 2:
                mix, total, best = _take(mix, total, best, two.to(tl.float32), score, eps, D)
        else:
            for j in tl.range(0, READABLE, num_stages=STAGES):
                v = tl.load(bank + j * bank_row, mask=live, other=0.0).to(tl.float32)
                mix, total, best = _take(mix, total, best, v, score, eps, D)
        mix = (mix / total).to(kind).to(tl.float32)
    if WRITE:
        tl.debug_barrier()  # the row written may be one that was read, by other threads
        tl.store(bank + write_row * bank_row, p, mask=live)
    if NORM:
        mix = mix * tl.rsqrt(tl.sum(mix * mix, 0) / D + eps)
        mix = mix * tl.load(norm_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + at, mix.to(kind), mask=live)


def read(
    prefix: Tensor, bank: Tensor, readable: int, score: Tensor, *, eps: float,
    pending: Tensor | None = None, norm: Tensor | None = None, write_row: int | None = None,
    num_warps: int | None = None, stages: int = 3,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `common.ops.attnres.read`."""
    rows, width = prefix.shape
    out = torch.empty((rows, width), dtype=prefix.dtype, device=prefix.device)
    total = torch.empty_like(out) if pending is not None else prefix
    if rows:
        attnres_kernel[(rows,)](
            prefix, prefix.stride(0), pending, 0 if pending is None else pending.stride(0),
            bank, bank.stride(0), bank.stride(1), score, norm, out, total, write_row or 0, eps,
            READABLE=readable, PENDING=pending is not None, NORM=norm is not None,
            WRITE=write_row is not None, D=width, BLOCK=triton.next_power_of_2(width),
            STAGES=stages,
            num_warps=num_warps or (4 if readable <= 1 else 8),
        )  # fmt: skip
    return out, total
