"""The special-function unit's approximations, for Triton kernels that can afford them.

`FAST` is for a GPU alone; without it, as under Triton's interpreter, the plain operation is taken.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(x, FAST: tl.constexpr):
    """1 / x of fp32; fast: within one unit in the last place."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return 1.0 / x


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x of fp32; fast: within two units in the last place, and below 2^-126 zero."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return tl.exp2(x)
