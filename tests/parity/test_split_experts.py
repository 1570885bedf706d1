"""Packed experts on FP8 units: activations in two parts, weights exactly."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.triton_ops import DEVICE, GPU, off_by, randn

from common.ops import moe, quant
from common.ops.act import Activation
from common.ops.moe import triton as fast_moe
from common.ops.moe import triton_split
from common.ops.moe.grouping import Tiling
from common.ops.select import fitted_experts
from common.ops.table import REFERENCE

SITU = Activation(kind="situ", beta=4.0, linear_beta=25.0)
pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)
SMALL = Tiling(rows=16, width=64, depth=128, stages=2, warps=4)


def packed(count: int, inner: int, width: int) -> moe.ExpertStack:
    w13, w13_scale = quant.pack_mxfp4(torch.randn(count, 2 * inner, width) * 0.05)
    w2, w2_scale = quant.pack_mxfp4(torch.randn(count, width, inner) * 0.05)
    parts = [x.to(DEVICE) for x in (w13, w2, w13_scale, w2_scale)]
    return moe.ExpertStack(w13=parts[0], w2=parts[1], w13_scale=parts[2], w2_scale=parts[3])


def random_codes(count: int, inner: int, width: int) -> moe.ExpertStack:
    """Any codes, made where the kernels run: packing so many takes a CPU a minute."""

    def fill(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=DEVICE).random_(low, high)

    return moe.ExpertStack(
        w13=fill(count, 2 * inner, width // 2), w2=fill(count, width, inner // 2),
        w13_scale=fill(count, 2 * inner, width // 32, low=116, high=121),
        w2_scale=fill(count, width, inner // 32, low=116, high=121),
    )  # fmt: skip


def check(stack: moe.ExpertStack, rows: int, top: int, dtype: torch.dtype, tiles) -> float:
    """Relative error of both products against the definition's weighted sum."""
    ids = torch.rand(rows, stack.num_experts, device=DEVICE).topk(top, -1).indices.sort(-1).values
    sizes = torch.logspace(-3, 3, rows, device=DEVICE).unsqueeze(1)
    x = (randn(rows, stack.w2.shape[1]) * sizes).to(dtype)
    ready = triton_split.based(stack)
    assert ready is not None
    made = triton_split.products(x, ids, ready, SITU, tiles)()
    weights = torch.rand(rows, top, device=DEVICE)
    out = (made.view(rows, top, -1).float() * weights.unsqueeze(-1)).sum(1)
    wanted = moe.experts(x, ids, weights, stack, SITU, None).float()
    return max(off_by(a, b) for a, b in zip(out, wanted, strict=True))


@pytest.mark.skipif(GPU, reason="on a device the parts are FP8, see below")
@pytest.mark.parametrize("rows", [1, 37])
def test_experts_in_parts_equal_the_loop_over_them(rows: int) -> None:
    stack = packed(4, 128, 256)
    stack.w13[0, 3, :16] = 0  # a group of zeros may have any scale
    stack.w13_scale[0, 3, 0] = 1
    assert check(stack, rows, 2, torch.float32, (SMALL, SMALL)) < 1e-5


def test_scales_too_far_apart_are_left_to_another_body() -> None:
    stack = packed(2, 128, 128)
    assert triton_split.based(stack) is not None
    far = stack.w2_scale.clone()
    far[1, 5, 0] = far[1, 5].max() - 12
    assert triton_split.based(dataclasses.replace(stack, w2_scale=far)) is None
    assert triton_split.based(moe.ExpertStack(w13=stack.w13, w2=stack.w2)) is None


def test_loaded_experts_are_fitted_unless_they_change_ranks() -> None:
    """What is derived of experts does not travel with them."""
    ops = dataclasses.replace(REFERENCE, experts=fast_moe.experts)
    stack = packed(2, 128, 128)
    assert fitted_experts(ops, stack).w13_base is not None
    assert fitted_experts(ops, stack, moves=True) is stack
    assert fitted_experts(REFERENCE, stack) is stack


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [None, True, False], ids=["chosen", "many sums", "one sum"])
@pytest.mark.parametrize("rows", [1, 100])
def test_split_experts_of_the_release_equal_the_loop_over_them(rows: int, tiles) -> None:
    stack = random_codes(56, 3072, 3584)
    tiling = Tiling(rows=16, width=128, depth=256, stages=3, warps=4, sums=bool(tiles))
    pair = None if tiles is None else (tiling, tiling)
    error = check(stack, rows, 16, torch.bfloat16, pair)
    print(f"rows {rows} tiles {tiles}: {error:.2e}")
    assert error < 6e-3
