"""Causal latent attention of chunks, in the expanded form.

One product expands the latents of all shares' pages into keys and values; one launch attends, two
chunks of queries to a program, keys and values streaming past. Blocks that every query of a program
sees are not masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.plan import Chunks
from common.ops.rows.triton import linear

LOG2E = tl.constexpr(1.4426950408889634)
ROWS = 64  # tokens of a chunk, and of a page


@triton.jit
def _attend(
    acc, best, mass, q, q_rest, kv_at, rest_at, begin, place, total, scale,
    MASK: tl.constexpr, N: tl.constexpr, NOPE: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    KV: tl.constexpr, ENTRY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one block of keys and values."""
    key = begin + tl.arange(0, N)
    wide = key.to(tl.int64)[:, None]
    k = tl.load(kv_at + wide * KV + tl.arange(0, NOPE)[None, :])
    rest = tl.load(rest_at + wide * ENTRY + tl.arange(0, P)[None, :])
    v_at = kv_at + wide * KV + NOPE + tl.arange(0, V)[None, :]
    v = tl.load(v_at, mask=(key < total)[:, None], other=0.0) if MASK else tl.load(v_at)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    score = tl.dot(q_rest, tl.trans(rest), score, input_precision=PRECISION)
    score = score * (scale * LOG2E)
    if MASK:
        seen = (key[None, :] <= place[:, None]) & (key < total)[None, :]
        score = tl.where(seen, score, float("-inf"))
    new = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - new[:, None])
    fade = tl.exp2(best - new)
    mass = mass * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new, mass


@triton.jit
def mla_chunk_kernel(
    q_ptr, kv_ptr, entry_ptr, first_ptr, start_ptr, length_ptr, out_ptr, pages, chunks, scale,
    H: tl.constexpr, NOPE: tl.constexpr, P: tl.constexpr, V: tl.constexpr, KV: tl.constexpr,
    ENTRY: tl.constexpr, T: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, chunks); the even chunks of a share take the next one along."""
    head = tl.program_id(0)
    chunk = chunks - 1 - tl.program_id(1)  # the longest first
    share = 0
    while tl.load(first_ptr + share + 1) <= chunk:
        share += 1
    first = tl.load(first_ptr + share).to(tl.int32)
    after = tl.load(first_ptr + share + 1).to(tl.int32)
    if (chunk - first) % 2 == 1:
        return
    start = tl.load(start_ptr + share).to(tl.int32)
    total = start + (after - 1 - first) * T + tl.load(length_ptr + after - 1).to(tl.int32)
    row = tl.arange(0, 2 * T)
    own = chunk * T + row < after * T
    place = start + (chunk - first) * T + row
    q_at = q_ptr + ((chunk * T + row).to(tl.int64) * H + head)[:, None] * (NOPE + P)
    q = tl.load(q_at + tl.arange(0, NOPE)[None, :], mask=own[:, None], other=0.0)
    q_rest = tl.load(q_at + NOPE + tl.arange(0, P)[None, :], mask=own[:, None], other=0.0)
    base = first.to(tl.int64) * 0 + share * pages * T
    kv_at = kv_ptr + base * KV + head * (NOPE + V)
    rest_at = entry_ptr + base * ENTRY + (ENTRY - P)
    best = tl.full([2 * T], float("-inf"), tl.float32)
    mass = tl.zeros([2 * T], tl.float32)
    acc = tl.zeros([2 * T, V], tl.float32)
    clear = start + (chunk - first) * T  # every query sees all keys before this one
    for begin in tl.range(0, clear, N, num_stages=STAGES):
        acc, best, mass = _attend(
            acc, best, mass, q, q_rest, kv_at, rest_at, begin, place, total, scale,
            False, N, NOPE, P, V, KV, ENTRY, PRECISION,
        )  # fmt: skip
    for begin in tl.range(clear, tl.minimum(clear + 2 * T, total), N, num_stages=1):
        acc, best, mass = _attend(
            acc, best, mass, q, q_rest, kv_at, rest_at, begin, place, total, scale,
            True, N, NOPE, P, V, KV, ENTRY, PRECISION,
        )  # fmt: skip
    out_at = out_ptr + ((chunk * T + row).to(tl.int64) * H + head)[:, None] * V
    acc = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at + tl.arange(0, V)[None, :], acc, mask=own[:, None])


def attend_chunks(
    q: Tensor, pages: Tensor, layer: int, kv_b: Tensor, scale: float, plan: Chunks,
    tile: int | None,
) -> Tensor:  # fmt: skip
    """See `common.ops.mla.attend_chunks`."""
    chunks, rows, heads, width = q.shape
    rank, rope = kv_b.shape[2], pages.shape[3] - kv_b.shape[2]
    entries = pages[plan.tables.clamp(min=0).flatten(), layer].flatten(0, 1)  # [S * P * 64, W]
    wide = linear(entries[:, :rank], kv_b.flatten(0, 1), tile)
    nope, value = width - rope, kv_b.shape[1] - width + rope
    q = q.contiguous()
    out = torch.empty((chunks, rows, heads, value), dtype=q.dtype, device=q.device)
    if chunks:
        half = q.dtype == torch.bfloat16
        mla_chunk_kernel[(heads, chunks)](
            q, wide, entries, plan.first, plan.starts, plan.lengths, out, plan.tables.shape[1],
            chunks, scale, H=heads, NOPE=nope, P=rope, V=value, KV=wide.shape[1],
            ENTRY=entries.shape[1], T=rows, N=64, STAGES=2, PRECISION="tf32" if half else "ieee",
            num_warps=8,
        )  # fmt: skip
    return out
