"""One token of KDA for a batch, fused into one launch, the state updated in place.

A program owns one head of one request: it does the convolution, the gate, both L2 norms, the
recurrence and the gated RMS norm, and reads and writes the head's 64 KiB of state once. No other
program touches that head, so nothing is ordered between programs. Knows nothing of pools: it gets
one layer's view of them, whose slot stride may pass 2**31 elements.

Memory sets the pace, so three things are laid out for it. Everything is asked for before anything
is waited for: a barrier and a branch stand between, since the compiler otherwise moves the state's
loads behind the convolution's arithmetic. A warp's rows of the state follow one another in memory.
And q, k, v and the gate are rows of one tile, so that each of their channels is computed once and
not in every warp.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
WARPS = 8  # of a program


@triton.jit
def _convolve(now, t0, t1, t2, w0, w1, w2, w3):
    """Convolution and SiLU, rounded as its inputs are; the oldest tap is weighted first."""
    mixed = t0.to(tl.float32) * w0
    mixed += t1.to(tl.float32) * w1
    mixed += t2.to(tl.float32) * w2
    mixed += now.to(tl.float32) * w3
    return (mixed * tl.sigmoid(mixed)).to(now.dtype).to(tl.float32)


@triton.jit
def kda_step_kernel(
    raw_ptr, raw_row, f_ptr, f_row, beta_ptr, beta_row, gate_ptr, gate_row, out_ptr, slot_ptr,
    state_ptr, state_slot, conv_ptr, conv_slot, w_ptr, rate_ptr, bias_ptr, norm_ptr,
    lower, scale, eps,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, requests); W warps hold a head's whole state, D / W rows each.

    EARLY: the launch may begin while the one before it ends; until the wait it reads parameters
    only.
    """
    inner: tl.constexpr = H * D
    R: tl.constexpr = D // W
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    chan = tl.arange(0, D)
    which = tl.arange(0, 4)[:, None]  # rows of the tile: q, k, v, forget gate
    is_conv, is_gate = which < 3, which == 3
    own = head * D + chan[None, :]
    at = which * inner + own
    w0 = tl.load(w_ptr + at, mask=is_conv, other=0.0)
    w1 = tl.load(w_ptr + 3 * inner + at, mask=is_conv, other=0.0)
    w2 = tl.load(w_ptr + 6 * inner + at, mask=is_conv, other=0.0)
    w3 = tl.load(w_ptr + 9 * inner + at, mask=is_conv, other=0.0)
    bias = tl.load(bias_ptr + own + which * 0, mask=is_gate, other=0.0)
    rate = tl.load(rate_ptr + head)
    if EARLY:
        gdc_wait()
    slot = tl.load(slot_ptr + request).to(tl.int64)
    now = tl.load(raw_ptr + request * raw_row + at, mask=is_conv, other=0.0)
    f = tl.load(f_ptr + request * f_row + own + which * 0, mask=is_gate, other=0.0)
    beta = tl.load(beta_ptr + request * beta_row + head)
    kind = out_ptr.dtype.element_ty
    row = (tl.arange(0, W) * R)[:, None] + tl.arange(0, R)[None, :]
    out_at = out_ptr + request * inner + head * D + row
    real = slot >= 0
    taps = conv_ptr + slot * conv_slot + head * (9 * D) + which * D + chan[None, :]
    t0 = tl.load(taps, mask=is_conv & real, other=0.0)
    t1 = tl.load(taps + 3 * D, mask=is_conv & real, other=0.0)
    t2 = tl.load(taps + 6 * D, mask=is_conv & real, other=0.0)
    tl.debug_barrier()  # keeps the small loads ahead of the large one
    state_at = state_ptr + slot * state_slot + head * (D * D)
    state_at += row[:, :, None] * D + chan[None, None, :]
    state = tl.load(state_at, mask=real)  # [warp, value, key]
    tl.debug_barrier()  # keeps all loads ahead of what waits for one
    if not real:
        tl.store(out_at, tl.zeros([W, R], kind))
        return
    u = _convolve(now, t0, t1, t2, w0, w1, w2, w3)
    length = tl.rsqrt(tl.sum(u * u, 1) + 1e-6)[:, None]
    u *= tl.where(which == 0, length * scale, tl.where(which == 1, length, 1.0))
    alpha = tl.exp2(lower * LOG2E * tl.sigmoid(rate * (f.to(tl.float32) + bias)))
    u = tl.where(is_gate, alpha, u)
    tl.store(taps, t1, mask=is_conv)
    tl.store(taps + 3 * D, t2, mask=is_conv)
    tl.store(taps + 6 * D, now, mask=is_conv)
    opened = tl.sigmoid(tl.load(gate_ptr + request * gate_row + head * D + row).to(tl.float32))
    norm = tl.load(norm_ptr + row)
    even, odd = tl.split(tl.reshape(tl.trans(u), [D, 2, 2]))
    q, v = tl.split(even)
    k, alpha = tl.split(odd)
    q, k, alpha = q[None, None, :], k[None, None, :], alpha[None, None, :]
    state = state * alpha
    wanted = tl.sum(state * k, 2)
    read = tl.sum(state * q, 2)  # what the read finds before this token is written
    error = tl.sigmoid(beta.to(tl.float32)) * (tl.reshape(v, [W, R]) - wanted)
    tl.store(state_at, state + error[:, :, None] * k)
    out = (read + error * tl.sum(k * q, 2)).to(kind).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(tl.sum(out * out, 1), 0) / D + eps) * norm * opened
    tl.store(out_at, out.to(kind))


@functools.cache
def _early(device: torch.device) -> bool:
    """Whether a launch on this device can begin before the one ahead of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    raw: Tensor, weight: Tensor, f: Tensor, rate: Tensor, bias: Tensor, lower_bound: float,
    beta: Tensor, gate: Tensor, norm: Tensor, eps: float, state: Tensor, conv: Tensor,
    slots: Tensor,
    out: Tensor, *, warps: int = WARPS,
) -> Tensor:  # fmt: skip
    """Advance every share by one token.

    The launch just before this one may write anything but `weight`, `rate` and `bias`: these are
    read before it has ended.

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
        padding. warps: of a program, a power of two, at most D.
    """
    batch, heads, dim = raw.shape[0], state.shape[1], state.shape[3]
    if not batch:
        return out
    early = _early(raw.device)
    kda_step_kernel[(heads, batch)](
        raw, raw.stride(0), f, f.stride(0), beta, beta.stride(0), gate, gate.stride(0), out, slots,
        state, state.stride(0), conv, conv.stride(0), weight, rate, bias, norm,
        lower_bound, dim**-0.5, eps,
        H=heads, D=dim, W=warps, EARLY=early, num_warps=warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
