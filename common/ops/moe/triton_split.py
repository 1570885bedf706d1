"""MXFP4 experts on FP8 matrix units: weights exactly, activations as the sum of two FP8 values.

An FP4 value times a power of two is an FP8 value, so a byte permutation unpacks four codes at once:
a group's scale picks the table that the codes index. A row of activations is divided by a power of
two and split into an upper and a lower part of four bits each, 16 times apart, which keeps what
bf16 has; their products are columns of one matrix product. The unit adds FP8 products with about 13
bits, so every `depth` of a sum is added in float32.

Within a row of weights scales may lie 11 powers of two apart (`spread`); offsets are 64-bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.act import Activation
from common.ops.moe.grouping import Tiling, fitted, group
from common.ops.moe.stack import ExpertStack
from common.ops.moe.triton_tile import activated, outputs_of

MOST_ROWS = 16  # of an expert, from which on bf16 products are faster
LOWEST, HIGHEST = -5, 6  # powers of two by which FP8 holds every FP4 value
GROUP = tl.constexpr(128)  # neighbours along the summed axis that are unpacked in another order
_APART = tl.constexpr(16.0)
_NORMAL, _STEPS = tl.constexpr(2.0**-6), tl.constexpr(1.5 * 2.0**14)  # of FP8; steps of 2^-9
_LOW, _LOW_STEP = tl.constexpr(0x3C383000), tl.constexpr(0x08080800)  # 0, .5, 1, 1.5 and a power
_HIGH, _HIGH_STEP = tl.constexpr(0x4C484440), tl.constexpr(0x08080808)  # 2, 3, 4, 6

# $2 is a word of eight codes, $3 and $7 are the tables (inputs come four at a time). A permutation
# looks up four magnitudes, another puts four signs where they belong.
_UNPACK = tl.constexpr("""
{
.reg .b32 a, b, m, n, s, t, u;
and.b32 a, $2, 0x77777777;
shr.u32 b, a, 16;
prmt.b32 m, $3, $7, a;
prmt.b32 n, $3, $7, b;
shl.b32 s, $2, 4;
prmt.b32 t, s, $2, 0x5140;
prmt.b32 u, s, $2, 0x7362;
lop3.b32 $0, t, 0x80808080, m, 0xEA;
lop3.b32 $1, u, 0x80808080, n, 0xEA;
}
""")


@triton.jit
def _slow(byte, low, high, NIBBLE: tl.constexpr):
    """A code of each byte as float32, from the same tables; for the interpreter."""
    code = (byte.to(tl.int32) >> (4 * NIBBLE)) & 15
    table = tl.where(code & 4 == 0, low, high)
    bits = (table >> (8 * (code & 3))) & 0x7F
    value = tl.where(bits == 0, 0, (bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code & 8 == 0, value, -value)


@triton.jit
def _weights(byte, low, high, BN: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr):
    """Packed bytes [BN, BK / 2] and each group's tables [BN, BK / 32] to [BN, BK], reordered."""
    low = tl.reshape(tl.broadcast_to(low[:, :, None], (BN, BK // 32, 16)), (BN, BK // 2))
    high = tl.reshape(tl.broadcast_to(high[:, :, None], (BN, BK // 32, 16)), (BN, BK // 2))
    if FAST:
        first, second = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r,r,r,r,r,r,r,r,r", [byte, low, high],
            (tl.float8e4nv, tl.float8e4nv), True, 4,
        )  # fmt: skip
        pairs = tl.join(first, second)  # codes 0-3 and 4-7 of a word
        parts = tl.reshape(pairs, (BN, BK // GROUP, 4, 4, 4, 2))  # lane, word, byte, half
        weights = tl.reshape(tl.permute(parts, (0, 1, 3, 5, 2, 4)), (BN, BK))
    else:
        pairs = tl.join(_slow(byte, low, high, 0), _slow(byte, low, high, 1))
        parts = tl.reshape(pairs, (BN, BK // GROUP, 4, 4, 2, 4))  # lane, word, half, place
        weights = tl.reshape(tl.permute(parts, (0, 1, 3, 4, 2, 5)), (BN, BK))
    return weights


@triton.jit
def split_kernel(x_ptr, x_row, parts_ptr, power_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: rows. A row as [upper | lower] parts in the order of the weights, and its power."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    # Place `at` of the result: word, half, lane, byte within 128; the weight there is this one's.
    inner = at % GROUP
    word, half, lane, byte = inner // 32, inner // 16 % 2, inner // 4 % 4, inner % 4
    source = at - inner + lane * 32 + word * 8 + half * 4 + byte
    x = tl.load(x_ptr + row * x_row + source, mask=at < K, other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 20), 250)  # biased; up to 2 ** (it - 126)
    divided = x * ((254 + 7 - exponent) << 23).to(tl.float32, bitcast=True)  # below 256
    # To four bits, or below the normal numbers to their step: FP8 holds it as it is. (A way through
    # FP8 and back would do the same, but Triton 3.6 brings its elements into another order.)
    word = divided.to(tl.int32, bitcast=True)
    word = (word + 0x7FFFF + ((word >> 20) & 1)) & -0x100000
    upper = word.to(tl.float32, bitcast=True)
    upper = tl.where(tl.abs(divided) < _NORMAL, (divided + _STEPS) - _STEPS, upper)
    kind = parts_ptr.dtype.element_ty
    tl.store(parts_ptr + row * 2 * K + at, upper.to(kind), mask=at < K)
    lower = (divided - upper) * _APART
    tl.store(parts_ptr + row * 2 * K + K + at, lower.to(kind), mask=at < K)
    tl.store(power_ptr + row, ((exponent - 7) << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["experts"])
def split_moe_kernel(
    x_ptr, power_ptr, w_ptr, w_expert, s_ptr, s_expert, base_ptr, out_ptr, source_ptr, expert_ptr,
    begin_ptr, offset_ptr, beta: tl.constexpr, linear_beta: tl.constexpr, k_of_row, experts,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, GATED: tl.constexpr, SITU: tl.constexpr, STAGES: tl.constexpr,
    SUMS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows * tiles. GATED: rows N.. of the weights make the second factor."""
    tiles: tl.constexpr = 2 * N // BN if GATED else N // BN
    rows: tl.constexpr = 2 * N if GATED else N
    block = tl.program_id(0) // tiles
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert >= experts:
        return
    both = tl.arange(0, 2 * BM)  # upper parts of BM rows, then lower parts
    begin, end = tl.load(begin_ptr + block), tl.load(offset_ptr + expert + 1)
    row = begin + both % BM
    live = row < end
    if GATED:
        row = tl.load(source_ptr + row, mask=live, other=0) // k_of_row
    wide, n = outputs_of(tl.program_id(0) % tiles, N, BN, GATED)
    k = tl.arange(0, BK)
    x_at = x_ptr + row.to(tl.int64)[:, None] * (2 * K) + (both // BM)[:, None] * K + k[None, :]
    w_at = w_ptr + expert * w_expert + wide[:, None] * (K // 2) + tl.arange(0, BK // 2)[None, :]
    s_at = s_ptr + expert * s_expert + wide[:, None] * (K // 32) + tl.arange(0, BK // 32)[None, :]
    base = tl.load(base_ptr + expert * rows + wide).to(tl.int32)
    low, high = base * -_LOW_STEP + _LOW, base * -_HIGH_STEP + _HIGH
    acc = tl.zeros([BN, 2 * BM], tl.float32)
    for _ in tl.range(0, K // BK, num_stages=STAGES):
        x = tl.trans(tl.load(x_at, mask=live[:, None], other=0.0))
        scale = tl.load(s_at).to(tl.int32)
        w = _weights(
            tl.load(w_at), scale * _LOW_STEP + low[:, None], scale * _HIGH_STEP + high[:, None],
            BN, BK, FAST,
        )  # fmt: skip
        if SUMS:
            acc += tl.dot(w, x.to(w.dtype))
        else:
            acc = tl.dot(w, x.to(w.dtype), acc)
        x_at += BK
        w_at += BK // 2
        s_at += BK // 32
    upper, lower = tl.split(tl.permute(tl.reshape(acc, (BN, 2, BM)), (0, 2, 1)))
    row = begin + tl.arange(0, BM)
    live = row < end
    source = tl.load(source_ptr + row, mask=live, other=0)
    taken = source // k_of_row if GATED else row
    power = tl.load(power_ptr + taken, mask=live, other=0.0)
    total = (upper + lower / _APART) * (base << 23).to(tl.float32, bitcast=True)[:, None]
    total *= power[None, :]
    if GATED:
        total = activated(total, beta, linear_beta, BN, BM, SITU, FAST)
        target = row.to(tl.int64)
    else:
        target = source.to(tl.int64)
    out_at = out_ptr + target[None, :] * N + n[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=live[None, :])


def based(stack: ExpertStack) -> ExpertStack | None:
    """The stack with the power of two that each row of weights is unpacked below, or None where a
    row's scales lie too far apart (or it is not packed). Scales of groups of zeros do not matter;
    they are moved, in place.
    """
    if stack.w13_scale is None or stack.w2_scale is None:
        return None
    bases = [_bases(stack.w13, stack.w13_scale), _bases(stack.w2, stack.w2_scale)]
    if bases[0] is None or bases[1] is None:
        return None
    return dataclasses.replace(stack, w13_base=bases[0], w2_base=bases[1])


def _bases(packed: Tensor, scale: Tensor) -> Tensor | None:
    """Of one matrix an expert, an expert at a time: [E, N]."""
    found = torch.empty(scale.shape[:2], dtype=torch.uint8, device=scale.device)
    for e in range(len(scale)):
        is_zero = (packed[e].unflatten(-1, (-1, 16)) & 0x77).amax(-1) == 0
        highest = scale[e].masked_fill(is_zero, 0).amax(-1)
        base = (highest.int() - HIGHEST).clamp(min=1)
        lowest = scale[e].masked_fill(is_zero, 255).amin(-1).int()
        if bool((lowest < base + LOWEST).any()) or bool((highest == 255).any()):
            return None
        scale[e] = torch.where(is_zero, base.unsqueeze(-1).to(torch.uint8), scale[e])
        found[e] = base.to(torch.uint8)
    return found


def serves(x: Tensor, ids: Tensor, stack: ExpertStack) -> bool:
    """Whether these products are the faster ones: measured, docs/benchmarks.md."""
    is_ready = stack.w13_base is not None and x.is_cuda and x.dtype == torch.bfloat16
    return is_ready and ids.numel() <= MOST_ROWS * stack.num_experts


def tilings(rows_per_expert: float) -> tuple[Tiling, Tiling]:
    """Tiles of the gate-up and of the down product, by the expected rows of an expert."""
    del rows_per_expert
    tiling = Tiling(rows=16, width=128, depth=256, stages=3, warps=4, registers=168, sums=False)
    return tiling, dataclasses.replace(tiling, sums=True)


def products(
    x: Tensor, ids: Tensor, stack: ExpertStack, activation: Activation,
    tiles: tuple[Tiling, Tiling] | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Group the choices; what is returned makes both products and gives [N * k, Z], by choice.

    The stack comes from `based`.
    """
    tiles = tiles or tilings(ids.numel() / stack.num_experts)
    width, inner, count = stack.w2.shape[1], stack.w2.shape[2] * 2, stack.num_experts
    up, down = fitted(tiles[0], 2 * inner, width), fitted(tiles[1], width, inner)
    source, expert, begin, offsets = group(ids, count, up.rows)
    hidden = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    chosen = torch.empty((ids.numel(), width), dtype=x.dtype, device=x.device)
    is_fast = x.is_cuda and x.dtype == torch.bfloat16
    kind = torch.float8_e4m3fn if is_fast else torch.float32

    def multiply(
        t: Tiling, gated: bool, left: Tensor, w: Tensor, s: Tensor, base: Tensor, target: Tensor
    ) -> None:
        rows, depth = left.shape
        n = target.shape[1]
        parts = torch.empty((rows, 2, depth), dtype=kind, device=x.device)
        power = torch.empty(rows, dtype=torch.float32, device=x.device)
        split_kernel[(rows,)](
            left, left.stride(0), parts, power, K=depth, BLOCK=triton.next_power_of_2(depth)
        )
        split_moe_kernel[(expert.shape[0] * ((2 * n if gated else n) // t.width),)](
            parts, power, w, w.stride(0), s, s.stride(0), base, target, source, expert, begin,
            offsets, activation.beta, activation.linear_beta or 0.0, ids.shape[1], count,
            N=n, K=depth, BN=t.width, BM=t.rows, BK=t.depth, GATED=gated,
            SITU=activation.kind == "situ", STAGES=t.stages, SUMS=t.sums, FAST=is_fast,
            num_warps=t.warps, maxnreg=t.registers,
        )  # fmt: skip

    def both() -> Tensor:
        assert stack.w13_scale is not None and stack.w2_scale is not None
        assert stack.w13_base is not None and stack.w2_base is not None
        multiply(up, True, x, stack.w13, stack.w13_scale, stack.w13_base, hidden)
        multiply(down, False, hidden, stack.w2, stack.w2_scale, stack.w2_base, chosen)
        return chosen

    return both
