"""KDA over many tokens of many requests, in chunks of 32, on the state pool.

Two launches. The first works on all chunks at once: gates, L2 norms, the products inside a chunk
and the inverse of its triangular system. The second walks each request's chunks in order with one
head's state in registers, value-major as in the pool, so that it is never written to shared memory.

Decays inside a chunk are taken from its middle row: with a bound of -5 a factor stays within
exp(+-80), which fp32 and bf16 hold; products that would overflow lie above the diagonal, where they
are replaced. Formulas: docs/model.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.plan import Chunks
from common.ops.triton_fast import exp2, inverse

HALF = 32  # rows of one triangular system; a chunk of the grid is two
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _invert(m, C: tl.constexpr, DTYPE: tl.constexpr):
    """(I + m)^-1 for strictly lower triangular m [C, C], C = 32.

    Blocks of two rows are inverted exactly, then joined four times. Every factor is m or the
    inverse of one of its blocks, and their elements are at most 1 for keys of length 1 (a product
    of contractions), so fp16 holds them with the precision of tf32.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    out = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -m, 0.0))
    for level in tl.static_range(1, 5):
        joins = (i >> level == (j >> level) + 1) & (i >> (level + 1) == j >> (level + 1))
        done = out.to(DTYPE)
        half = tl.dot(done, tl.where(joins, m, 0.0).to(DTYPE), input_precision="ieee")
        out -= tl.dot(half.to(DTYPE), done, input_precision="ieee")
    return out


@triton.jit
def kda_chunk_kernel(
    q_ptr, k_ptr, qk_row, g_ptr, g_row, beta_ptr, beta_row, rate_ptr, bias_ptr, length_ptr,
    qg_ptr, ks_ptr, ke_ptr, p_ptr, x_ptr, lens_ptr, fade_ptr, lower, scale,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, RAW: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, INVERSE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid: half chunks * heads. Everything a chunk can know without the state before it.

    Keys and queries are taken BD channels at a time and stored with their decays but without their
    norms, which are known only at the end and go beside them. RAW: `g` and `beta` hold logits;
    otherwise the log decay and beta itself, in fp32.
    """
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // H, pid % H
    start = chunk * C
    count = tl.load(length_ptr + chunk // 2) - (chunk % 2) * C
    row = tl.arange(0, C)
    real = row < count
    live = real[:, None]
    i = row[:, None]
    j = row[None, :]
    rows = (start + row)[:, None]
    rate = 0.0
    if RAW:
        rate = -LOG2E * tl.load(rate_ptr + head)
    m = tl.zeros([C, C], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    k_long = tl.zeros([C], tl.float32)
    q_long = tl.zeros([C], tl.float32)
    for part in tl.static_range(D // BD):
        chan = part * BD + tl.arange(0, BD)
        at = head * D + chan[None, :]
        g = tl.load(g_ptr + rows * g_row + at, mask=live, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + rows * qk_row + at, mask=live, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + rows * qk_row + at, mask=live, other=0.0).to(tl.float32)
        if RAW:
            z = rate * (g + tl.load(bias_ptr + head * D + chan)[None, :])
            g = tl.where(live, lower * LOG2E, 0.0) * inverse(1.0 + exp2(z, FAST), FAST)
        else:
            g = g * LOG2E
        last = tl.sum(g, 0)
        middle = tl.sum(tl.where(i < C // 2, g, 0.0), 0)
        k_long += tl.sum(k * k, 1)
        q_long += tl.sum(q * q, 1)
        x = tl.cumsum(g, 0) - middle[None, :]
        rise = exp2(x, FAST)
        kup = (k * rise).to(DTYPE)
        qup = (q * rise).to(DTYPE)
        kdown = (k * exp2(-x, FAST)).to(DTYPE)
        flat = pid * (C * D) + i * D + chan[None, :]
        tl.store(ks_ptr + flat, kup)
        tl.store(qg_ptr + flat, qup)
        tl.store(ke_ptr + flat, kdown)
        tl.store(fade_ptr + pid * (2 * D) + chan, tl.exp2(middle))
        tl.store(fade_ptr + pid * (2 * D) + D + chan, tl.exp2(last - middle))
        other = tl.trans(kdown)
        m = tl.dot(kup, other, m, input_precision=PRECISION)
        p = tl.dot(qup, other, p, input_precision=PRECISION)
    k_long = tl.rsqrt(k_long + 1e-6)
    q_long = scale * tl.rsqrt(q_long + 1e-6)
    tl.store(lens_ptr + pid * (2 * C) + row, k_long)
    tl.store(lens_ptr + pid * (2 * C) + C + row, q_long)
    beta = tl.load(beta_ptr + (start + row) * beta_row + head, mask=real, other=0.0).to(tl.float32)
    if RAW:
        beta = tl.where(real, tl.sigmoid(beta), 0.0)
    square = pid * (C * C) + i * C + j
    p = tl.where(j <= i, p * q_long[:, None] * k_long[None, :], 0.0)
    tl.store(p_ptr + square, p.to(DTYPE))
    m = tl.where(j < i, m * (beta * k_long)[:, None] * k_long[None, :], 0.0)
    solved = _invert(m, C, INVERSE)
    tl.store(x_ptr + square, (solved * beta[None, :]).to(DTYPE))


@triton.jit
def kda_scan_kernel(
    qg_ptr, ks_ptr, ke_ptr, p_ptr, x_ptr, lens_ptr, fade_ptr, v_ptr, v_row, first_ptr,
    slot_ptr, state_ptr, state_slot, out_ptr, out_row,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (heads * D / BV, shares). `first` counts whole chunks and has one entry more.

    Rows of padding hold zero keys, queries and betas, so they read zeros and change nothing.
    """
    splits: tl.constexpr = D // BV
    share = tl.program_id(1)
    head = tl.program_id(0) // splits
    value = (tl.program_id(0) % splits) * BV + tl.arange(0, BV)
    key = tl.arange(0, D)
    row = tl.arange(0, C)
    slot = tl.load(slot_ptr + share).to(tl.int64)
    begin = tl.load(first_ptr + share).to(tl.int64) * 2
    end = tl.load(first_ptr + share + 1).to(tl.int64) * 2
    state_at = state_ptr + slot * state_slot + head * (D * D) + value[:, None] * D + key[None, :]
    s = tl.load(state_at)
    v_at = v_ptr + row[None, :] * v_row + head * D + value[:, None]
    ahead = tl.load(v_at + begin * C * v_row)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        v = ahead  # asked for one round ago: it is the only load that meets no product
        ahead = tl.load(v_at + tl.minimum(chunk + 1, end - 1) * C * v_row)
        pid = chunk * H + head
        wide = pid * (C * D) + row[:, None] * D + key[None, :]
        square = pid * (C * C) + row[:, None] * C + row[None, :]
        place = (chunk * C + row)[None, :]
        across = head * D + value[:, None]
        ks = tl.load(ks_ptr + wide)
        x = tl.load(x_ptr + square)
        qg = tl.load(qg_ptr + wide)
        p = tl.load(p_ptr + square)
        ke = tl.load(ke_ptr + wide)
        since = tl.load(fade_ptr + pid * (2 * D) + key)
        until = tl.load(fade_ptr + pid * (2 * D) + D + key)
        k_long = tl.load(lens_ptr + pid * (2 * C) + row)
        q_long = tl.load(lens_ptr + pid * (2 * C) + C + row)
        s = s * since[None, :]
        held = s.to(DTYPE)
        missing = tl.dot(held, tl.trans(ks), input_precision=PRECISION)
        o = tl.dot(held, tl.trans(qg), input_precision=PRECISION) * q_long[None, :]
        missing = v.to(tl.float32) - missing * k_long[None, :]
        y = tl.dot(missing.to(DTYPE), tl.trans(x), input_precision=PRECISION)
        o = tl.dot(y.to(DTYPE), tl.trans(p), o, input_precision=PRECISION)
        s = tl.dot((y * k_long[None, :]).to(DTYPE), ke, s, input_precision=PRECISION)
        s = s * until[None, :]
        tl.store(out_ptr + place * out_row + across, o.to(out_ptr.dtype.element_ty))
    tl.store(state_at, s)


def chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layer: int,
    plan: Chunks,
) -> Tensor:  # fmt: skip
    """See `common.ops.kda.chunks`; the log decay must not fall below -5 a token."""
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    return launch(q, k, v, g, beta, None, None, None, state[:, layer], plan, out)


def launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rate: Tensor | None,
    bias: Tensor | None, lower_bound: float | None, state: Tensor, plan: Chunks, out: Tensor, *,
    precision: str | None = None, block_v: int = 64, depth: int = 32,
    warps: tuple[int, int] = (1, 4), stages: int = 3,
) -> Tensor:  # fmt: skip
    """Both launches; with `rate`, `bias` and `lower_bound`, g and beta are logits.

    Args:
        q, k, v: [C, 64, H, D]; rows of any stride, the same for q and k; heads contiguous.
        g: [C, 64, H, D]. beta: [C, 64, H].
        rate: fp32 [H]. bias: fp32 [H, D]. lower_bound: in [-5, 0).
        state: one layer's view of the pool, fp32 [slots, H, D, D]; changed.
        plan: where the chunks belong.
        out: [C, 64, H, D], contiguous; receives the reads.
    """
    heads, dim, c = state.shape[1], state.shape[3], HALF
    precision = precision or ("tf32" if q.dtype == torch.bfloat16 else "ieee")
    block_v = min(block_v, dim)
    n = 2 * q.shape[0] * heads
    kind = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[q.dtype]
    qg, ks, ke = torch.empty((3, n, c, dim), dtype=q.dtype, device=q.device)
    p, x = torch.empty((2, n, c, c), dtype=q.dtype, device=q.device)
    lens = torch.empty((n, 2, c), dtype=torch.float32, device=q.device)
    fade = torch.empty((n, 2, dim), dtype=torch.float32, device=q.device)
    kda_chunk_kernel[(n,)](
        q, k, q.stride(1), g, g.stride(1), beta, beta.stride(1), rate, bias, plan.lengths,
        qg, ks, ke, p, x, lens, fade, lower_bound or 0.0, dim**-0.5,
        H=heads, D=dim, C=c, BD=min(depth, dim), RAW=rate is not None, PRECISION=precision,
        DTYPE=kind, FAST=q.is_cuda,
        INVERSE=tl.float16 if kind == tl.bfloat16 else kind, num_warps=warps[0],
    )  # fmt: skip
    kda_scan_kernel[(heads * dim // block_v, plan.slots.shape[0])](
        qg, ks, ke, p, x, lens, fade, v, v.stride(1), plan.first, plan.slots,
        state, state.stride(0), out, out.stride(1),
        H=heads, D=dim, C=c, BV=block_v, PRECISION=precision, DTYPE=kind, STAGES=stages,
        num_warps=warps[1],
    )  # fmt: skip
    return out
