"""SiTU and SwiGLU over [gate | up] rows in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.act import Activation


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """1 / x; fast: within one unit in the last place."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return 1.0 / x


@triton.jit
def _tanh_of(x, e, inverse):
    """tanh(x) from e = exp(-2 x) and 1 / (1 + e); near zero by its series, where 1 - e cancels."""
    return tl.where(tl.abs(x) < 0.03, x - x * x * x * (1.0 / 3.0), (1.0 - e) * inverse)


@triton.jit
def situ(gate, up, beta, linear_beta, FAST: tl.constexpr):
    """SiTU in fp32; `linear_beta` 0 takes `up` as it is. Beyond +-80 nothing changes any more."""
    if linear_beta > 0:
        x = tl.minimum(tl.maximum(up / linear_beta, -40.0), 40.0)
        e = tl.exp2(x * -2.885390081777927)
        up = linear_beta * _tanh_of(x, e, _inverse(1.0 + e, FAST))
    x = tl.minimum(tl.maximum(gate / beta, -40.0), 40.0)
    e = tl.exp2(x * -2.885390081777927)
    open_ = _inverse(1.0 + tl.exp2(gate * -1.4426950408889634), FAST)
    return beta * _tanh_of(x, e, _inverse(1.0 + e, FAST)) * open_ * up


@triton.jit
def activate_kernel(
    x_ptr, x_row, out_ptr, beta, linear_beta, F: tl.constexpr, SITU: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, F / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < F
    gate = tl.load(x_ptr + row * x_row + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + F + at, mask=live, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    if SITU:
        out = situ(gate, up, beta, linear_beta, FAST)
    else:
        out = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * up
    tl.store(out_ptr + row * F + at, out.to(kind), mask=live)


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `common.ops.act.activate`."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width) if gate_up.ndim != 2 else gate_up
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        block = min(1024, triton.next_power_of_2(width))
        activate_kernel[(rows.shape[0], triton.cdiv(width, block))](
            rows, rows.stride(0), out, activation.beta, activation.linear_beta or 0.0,
            F=width, SITU=activation.kind == "situ", FAST=rows.is_cuda, BLOCK=block,
        )  # fmt: skip
    return out
