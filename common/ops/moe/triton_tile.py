"""What grouped products share on either unit: a tile's outputs, and the activation of a gated one.

A gated tile holds half a tile of gates above the same of factors, so that one product makes both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.act.triton import situ


@triton.jit
def outputs_of(tile, N: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Rows of the weights in a tile, [BN], and the outputs made of them: [BN], GATED [BN / 2]."""
    wide = tl.arange(0, BN)
    if GATED:
        half: tl.constexpr = BN // 2
        rows = tile * half + (wide // half) * N + wide % half
        outputs = tile * half + tl.arange(0, half)
    else:
        rows = tile * BN + wide
        outputs = rows
    return rows, outputs


@triton.jit
def activated(
    sums, beta: tl.constexpr, linear_beta: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    SITU: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums [BN, BM] of a gated tile to [BN / 2, BM]."""
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BN // 2, BM)), (1, 2, 0)))
    if SITU:
        out = situ(gate, up, beta, linear_beta, FAST)
    else:
        out = gate * tl.sigmoid(gate) * up
    return out
