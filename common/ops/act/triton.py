"""SiTU and SwiGLU over [gate | up] rows in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.act import Activation
from common.ops.triton_fast import exp2, inverse


@triton.jit
def _bounded(x, most: tl.constexpr, FAST: tl.constexpr):
    """most * tanh(x / most) as most - 2 most / (1 + exp(2 x / most)); near zero, where that
    cancels, by its series.
    """
    rest = inverse(1.0 + exp2(x * (2.885390081777927 / most), FAST), FAST)
    series = x * (1.0 - x * x * (1.0 / (3.0 * most * most)))
    return tl.where(tl.abs(x) < 0.03 * most, series, most - 2.0 * most * rest)


@triton.jit
def situ(gate, up, beta: tl.constexpr, linear_beta: tl.constexpr, FAST: tl.constexpr):
    """SiTU in fp32; `linear_beta` 0 takes `up` as it is."""
    if linear_beta > 0:
        up = _bounded(up, linear_beta, FAST)
    open_ = inverse(1.0 + exp2(gate * -1.4426950408889634, FAST), FAST)
    return _bounded(gate, beta, FAST) * open_ * up


@triton.jit
def activate_kernel(
    x_ptr, x_row, out_ptr, beta: tl.constexpr, linear_beta: tl.constexpr,
    F: tl.constexpr, SITU: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
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
