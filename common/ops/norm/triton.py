"""Root-mean-square norms, one launch each, memory read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_kernel(x_ptr, x_row, weight_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < D
    x = tl.load(x_ptr + row * x_row + at, mask=live, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    x = x * tl.load(weight_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + at, x.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def gated_rms_kernel(
    x_ptr, x_row, gate_ptr, gate_row, weight_ptr, out_ptr, rows, eps,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows * H) / BLOCK; a program takes BLOCK heads."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = item // H, item % H
    at = tl.arange(0, D)[None, :]
    live = (row < rows)[:, None]
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + (row * x_row + head * D)[:, None] + at, mask=live, other=0.0)
    x = x.to(kind).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    gate = tl.load(gate_ptr + (row * gate_row + head * D)[:, None] + at, mask=live, other=0.0)
    x = x * tl.load(weight_ptr + at).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))
    tl.store(out_ptr + item[:, None] * D + at, x.to(kind), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `common.ops.norm.rms_norm`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width) if x.ndim != 2 else x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = triton.next_power_of_2(width)
        warps = min(8, max(1, block // 512))
        rms_kernel[(rows.shape[0],)](
            rows, rows.stride(0), weight, out, eps, D=width, BLOCK=block, num_warps=warps
        )
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `common.ops.norm.gated_rms_norm`."""
    rows, heads, dim = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if rows:
        block = 16
        gated_rms_kernel[(triton.cdiv(rows * heads, block),)](
            x,
            x.stride(0),
            gate,
            gate.stride(0),
            weight,
            out,
            rows,
            eps,
            H=heads,
            D=dim,
            BLOCK=block,
        )
    return out
