"""The bf16 experts with nothing unpacked: what is left of their time, and so unpacking's share.

Packed words and powers go to the matrix unit as they are, so the sums mean nothing; loads, products
and stores stay what they were.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import triton
import triton.language as tl

from common.ops.quant.triton import GROUP

_MOVE = tl.constexpr("""
{
mov.b32 {$0, $1}, $8;
mov.b32 {$2, $3}, $9;
mov.b32 {$4, $5}, $8;
mov.b32 {$6, $7}, $9;
}
""")


@triton.jit
def bare_tile(
    at, scale_at, N: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """`weights_tile` without its arithmetic: a tile of the same layout, of other numbers."""
    word = tl.load(at)
    power = ((tl.load(scale_at).to(tl.int32) + 126) << 7) * 0x10001
    power = tl.reshape(tl.broadcast_to(power[:, :, None], (N, K // 32, 4)), (N, K // 8))
    b0, b2, c0, c2, b1, b3, c1, c3 = tl.inline_asm_elementwise(
        _MOVE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, power],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
         tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 1,
    )  # fmt: skip
    first = tl.join(tl.join(b0, b2), tl.join(c0, c2))
    second = tl.join(tl.join(b1, b3), tl.join(c1, c3))
    all_ = tl.reshape(tl.join(first, second), (N, K // GROUP, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(all_, (0, 1, 3, 6, 5, 2, 4)), (N, K))


def bare_experts() -> ModuleType:
    """A second `common.ops.moe.triton`, whose kernels unpack nothing."""
    found = importlib.util.find_spec("common.ops.moe.triton")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.weights_tile = bare_tile  # type: ignore[attr-defined]
    return module
