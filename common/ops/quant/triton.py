"""MXFP4 weights unpacked in registers, as grouped products on Hopper read them.

A code's three magnitude bits, put where bf16 has its lowest exponent and highest mantissa bit, are
its value times 2^-126 (the subnormal 0.5 included), so one exact product with 2^(scale - 1) gives
the weight. That power is a bf16 number for scales up to 128, weights up to 12; larger ones are
refused at load.

The matrix unit wants each thread to hold pairs of neighbours, eight apart; a thread that reads 16
bytes holds 32 neighbours, and unpacks pairs four apart most cheaply. A sum does not mind its order,
so a tile keeps the order of the threads, and the product's other operand is put into it too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_SCALE = 128
KINDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
GROUP = tl.constexpr(128)  # neighbours along the summed axis that are unpacked in another order

# A word holds eight codes, two 16-bit lanes of four. One product moves a lane's code to two places,
# its magnitude to bits 6-8 from one copy and its sign to bit 15 from the other; a mask keeps those.
_UNPACK = tl.constexpr("""
{
.reg .b32 a, b, w;
and.b32 a, $8, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 a, a, $9;
mov.b32 {$0, $1}, a;
and.b32 b, $8, 0x00F000F0;
mul.lo.u32 b, b, 0x104;
and.b32 b, b, 0x81C081C0;
mul.rn.bf16x2 b, b, $9;
mov.b32 {$2, $3}, b;
shr.u32 w, $8, 8;
and.b32 a, w, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 a, a, $9;
mov.b32 {$4, $5}, a;
and.b32 b, w, 0x00F000F0;
mul.lo.u32 b, b, 0x104;
and.b32 b, b, 0x81C081C0;
mul.rn.bf16x2 b, b, $9;
mov.b32 {$6, $7}, b;
}
""")


@triton.jit
def _code(word, power, BYTE: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One of a word's codes as a weight; the slow way, in fp32."""
    code = word >> (8 * BYTE + 4 * HIGH)
    value = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return (value * power).to(DTYPE)


@triton.jit
def weights_tile(
    at, scale_at, N: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """A tile of packed weights, unpacked, in the order of `arrange`: [N, K]."""
    word = tl.load(at)
    scale = tl.load(scale_at).to(tl.int32) + 126  # the exponent of 2^(scale - 1)
    if FAST:
        power = (scale << 7) * 0x10001
    else:
        power = (scale << 23).to(tl.float32, bitcast=True)
    power = tl.reshape(tl.broadcast_to(power[:, :, None], (N, K // 32, 4)), (N, K // 8))
    if FAST:
        b0, b2, c0, c2, b1, b3, c1, c3 = tl.inline_asm_elementwise(
            _UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, power],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
             tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 1,
        )  # fmt: skip
    else:
        b0, c0 = _code(word, power, 0, 0, DTYPE), _code(word, power, 0, 1, DTYPE)
        b1, c1 = _code(word, power, 1, 0, DTYPE), _code(word, power, 1, 1, DTYPE)
        b2, c2 = _code(word, power, 2, 0, DTYPE), _code(word, power, 2, 1, DTYPE)
        b3, c3 = _code(word, power, 3, 0, DTYPE), _code(word, power, 3, 1, DTYPE)
    first = tl.join(tl.join(b0, b2), tl.join(c0, c2))
    second = tl.join(tl.join(b1, b3), tl.join(c1, c3))
    all_ = tl.reshape(tl.join(first, second), (N, K // GROUP, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(all_, (0, 1, 3, 6, 5, 2, 4)), (N, K))


@triton.jit
def unpack_kernel(
    w_ptr, s_ptr, out_ptr, K: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """Grid: rows / N."""
    n = tl.program_id(0) * N + tl.arange(0, N)[:, None]
    for part in range(K // GROUP):
        w_at = w_ptr + n * (K // 8) + part * 16 + tl.arange(0, 16)[None, :]
        s_at = s_ptr + n * (K // 32) + part * 4 + tl.arange(0, 4)[None, :]
        tile = weights_tile(w_at, s_at, N, GROUP, DTYPE, FAST)
        tl.store(out_ptr + n * K + part * GROUP + tl.arange(0, GROUP)[None, :], tile)


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights as the products see them, in their usual order; for tests.

    Args:
        packed: uint8 [N, K / 2], N a multiple of 16, K of 128.
        scale: uint8 [N, K / 32], at most 128.
        dtype: of the result.

    Returns:
        [N, K].
    """
    rows, width = packed.shape[0], packed.shape[1] * 2
    out = torch.empty((rows, width), dtype=dtype, device=packed.device)
    kind = KINDS[dtype]
    unpack_kernel[(rows // 16,)](
        packed.view(torch.int32), scale, out,
        K=width, N=16, DTYPE=kind, FAST=packed.is_cuda and kind == tl.bfloat16,
    )  # fmt: skip
    parts = out.view(rows, -1, 4, 2, 2, 4, 2)
    return parts.permute(0, 1, 5, 2, 6, 3, 4).reshape(rows, width)
