"""One token of KDA for a batch, fused into one launch, the state updated in place.

A program owns one head of one request: it does the convolution, the gate, both L2 norms, the
recurrence and the gated RMS norm, and reads and writes the head's 64 KiB of state once. No other
program touches that head, so nothing is ordered between programs. There are two of the kind: one
warp a head for a full device, four for a few heads. Knows nothing of pools: it gets one layer's
view of them, whose slot stride may pass 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
REGISTERS = 144  # of a thread of the one-warp form: the fewest without a spill
WARPS_WORTH = 1024  # heads from which one warp each is faster than four


@triton.jit
def _convolve(now, t0, t1, t2, weight, TAP: tl.constexpr):
    """Convolution and SiLU of one of q, k, v; its oldest tap is weighted first."""
    mixed = t0.to(tl.float32) * tl.load(weight)
    mixed += t1.to(tl.float32) * tl.load(weight + TAP)
    mixed += t2.to(tl.float32) * tl.load(weight + 2 * TAP)
    mixed += now.to(tl.float32) * tl.load(weight + 3 * TAP)
    return (mixed * tl.sigmoid(mixed)).to(now.dtype).to(tl.float32)


@triton.jit
def _vectors(
    raw, f, beta, gate, taps, w_ptr, rate_ptr, bias_ptr, head, chan, lower, scale,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A head's q, k, v, decay, beta and opened gate; its window moves on by one row.

    A tap is read and written by one thread, as long as there are no more threads than channels.
    """
    inner: tl.constexpr = H * D
    at = head * D + chan
    q0, q1, q2 = tl.load(taps), tl.load(taps + 3 * D), tl.load(taps + 6 * D)
    k0, k1, k2 = tl.load(taps + D), tl.load(taps + 4 * D), tl.load(taps + 7 * D)
    v0, v1, v2 = tl.load(taps + 2 * D), tl.load(taps + 5 * D), tl.load(taps + 8 * D)
    q_raw, k_raw, v_raw = tl.load(raw), tl.load(raw + inner), tl.load(raw + 2 * inner)
    z = tl.load(f).to(tl.float32) + tl.load(bias_ptr + at)
    opened = tl.sigmoid(tl.load(gate).to(tl.float32))
    beta = tl.sigmoid(tl.load(beta).to(tl.float32))
    alpha = tl.exp2(lower * LOG2E * tl.sigmoid(tl.load(rate_ptr + head) * z))
    q = _convolve(q_raw, q0, q1, q2, w_ptr + at, 3 * inner)
    k = _convolve(k_raw, k0, k1, k2, w_ptr + inner + at, 3 * inner)
    v = _convolve(v_raw, v0, v1, v2, w_ptr + 2 * inner + at, 3 * inner)
    tl.store(taps, q1)
    tl.store(taps + 3 * D, q2)
    tl.store(taps + 6 * D, q_raw)
    tl.store(taps + D, k1)
    tl.store(taps + 4 * D, k2)
    tl.store(taps + 7 * D, k_raw)
    tl.store(taps + 2 * D, v1)
    tl.store(taps + 5 * D, v2)
    tl.store(taps + 8 * D, v_raw)
    q = q * (scale * tl.rsqrt(tl.sum(q * q, 0) + 1e-6))
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    return q, k, v, alpha, beta, opened


@triton.jit
def kda_head_kernel(
    raw_ptr, raw_row, f_ptr, f_row, beta_ptr, beta_row, gate_ptr, gate_row, out_ptr, slot_ptr,
    state_ptr, state_slot, conv_ptr, conv_slot, w_ptr, rate_ptr, bias_ptr, norm_ptr,
    lower, scale, eps,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, requests); D / 32 warps hold a head's whole state."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    chan = tl.arange(0, D)
    at = head * D + chan
    out_at = out_ptr + request * (H * D) + at
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if slot < 0:
        tl.store(out_at, tl.zeros([D], out_ptr.dtype.element_ty))
        return
    key = tl.arange(0, D)
    state_at = state_ptr + slot * state_slot + head * (D * D) + chan[:, None] * D + key[None, :]
    state = tl.load(state_at)  # [value, key]; the longest wait, so it starts first
    norm = tl.load(norm_ptr + chan)
    q, k, v, alpha, beta, opened = _vectors(
        raw_ptr + request * raw_row + at, f_ptr + request * f_row + at,
        beta_ptr + request * beta_row + head, gate_ptr + request * gate_row + at,
        conv_ptr + slot * conv_slot + head * (9 * D) + chan, w_ptr, rate_ptr, bias_ptr, head, chan,
        lower, scale, H, D,
    )  # fmt: skip
    state = state * alpha[None, :]
    wanted = tl.sum(state * k[None, :], 1)
    read = tl.sum(state * q[None, :], 1)  # what the read finds before this token is written
    error = beta * (v - wanted)
    tl.store(state_at, state + error[:, None] * k[None, :])
    out = (read + error * tl.sum(k * q, 0)).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(out * out, 0) / D + eps) * norm * opened
    tl.store(out_at, out.to(out_ptr.dtype.element_ty))


@triton.jit
def kda_warp_kernel(
    raw_ptr, raw_row, f_ptr, f_row, beta_ptr, beta_row, gate_ptr, gate_row, out_ptr, slot_ptr,
    state_ptr, state_slot, conv_ptr, conv_slot, w_ptr, rate_ptr, bias_ptr, norm_ptr,
    lower, scale, eps,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, requests); one warp walks down a head's state, the next rows on their way.

    No warp waits for another, so many of them keep memory busy. `out` holds v, then the raw read,
    then the result: it is in the cache, and each of them is of its dtype by definition.
    """
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    chan = tl.arange(0, D)
    at = head * D + chan
    kind = out_ptr.dtype.element_ty
    out_at = out_ptr + request * (H * D) + head * D
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if slot < 0:
        tl.store(out_at + chan, tl.zeros([D], kind))
        return
    row = tl.arange(0, ROWS)
    state_at = state_ptr + slot * state_slot + head * (D * D) + row[:, None] * D + chan[None, :]
    ahead = tl.load(state_at)
    later = tl.load(state_at + ROWS * D)
    norm = tl.load(norm_ptr + chan)
    q, k, v, alpha, beta, opened = _vectors(
        raw_ptr + request * raw_row + at, f_ptr + request * f_row + at,
        beta_ptr + request * beta_row + head, gate_ptr + request * gate_row + at,
        conv_ptr + slot * conv_slot + head * (9 * D) + chan, w_ptr, rate_ptr, bias_ptr, head, chan,
        lower, scale, H, D,
    )  # fmt: skip
    kq = tl.sum(k * q, 0)
    tl.store(out_at + chan, v.to(kind))
    tl.debug_barrier()
    for tile in tl.range(0, D // ROWS, num_stages=1):
        state = ahead * alpha[None, :]
        ahead = later
        later = tl.load(state_at + tl.minimum(tile + 2, D // ROWS - 1) * (ROWS * D))
        mine = out_at + tile * ROWS + row
        v_row = tl.load(mine, volatile=True).to(tl.float32)
        wanted = tl.sum(state * k[None, :], 1)
        read = tl.sum(state * q[None, :], 1)
        error = beta * (v_row - wanted)
        tl.store(state_at + tile * (ROWS * D), state + error[:, None] * k[None, :])
        tl.store(mine, (read + error * kq).to(kind))
    tl.debug_barrier()
    out = tl.load(out_at + chan, volatile=True).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(out * out, 0) / D + eps) * norm * opened
    tl.store(out_at + chan, out.to(kind))


def launch(
    raw: Tensor, weight: Tensor, f: Tensor, rate: Tensor, bias: Tensor, lower_bound: float,
    beta: Tensor, gate: Tensor, norm: Tensor, eps: float, state: Tensor, conv: Tensor,
    slots: Tensor,
    out: Tensor, *, rows: int | None = None, registers: int = REGISTERS,
) -> Tensor:  # fmt: skip
    """Advance every share by one token.

    Args:
        raw: [B, 3, H, D], raw projections q, k, v; may be strided over rows.
        weight: fp32 [4, 3, H, D], of the convolution.
        f: forget-gate logits [B, H, D]. rate: fp32 [H]. bias: fp32 [H, D].
        beta: logits [B, H]. gate: output-gate logits [B, H, D].
        norm: fp32 [D]. eps: of the norm.
        state: one layer's view of the pool, fp32 [slots, H, D (value), D (key)]; changed.
        conv: the same, [slots, H, 3, 3, D]; changed.
        slots: integers [B]; negative pads the batch.
        out: [B, H, D], contiguous; receives the normed and gated reads, zeros where a row is
        padding. rows: value rows a warp takes at a time; 0 for whole heads at once; by the batch
        when None.
    """
    batch, heads, dim = raw.shape[0], state.shape[1], state.shape[3]
    if not batch:
        return out
    if rows is None:
        rows = 0 if batch * heads < WARPS_WORTH else 8
    args = (
        raw, raw.stride(0), f, f.stride(0), beta, beta.stride(0), gate, gate.stride(0), out, slots,
        state, state.stride(0), conv, conv.stride(0), weight, rate, bias, norm,
        lower_bound, dim**-0.5, eps,
    )  # fmt: skip
    if rows:
        kda_warp_kernel[(heads, batch)](
            *args, H=heads, D=dim, ROWS=rows, num_warps=1, maxnreg=registers
        )
    else:
        kda_head_kernel[(heads, batch)](*args, H=heads, D=dim, num_warps=max(1, dim // 32))
    return out
