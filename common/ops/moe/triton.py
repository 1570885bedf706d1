"""MXFP4 experts: two grouped products over packed weights, SiTU between them, and the weighted sum.

Weights stay packed as the checkpoint has them and are unpacked in registers, on their way to the
matrix unit (`common.ops.quant.triton`). The weight tile is the left operand, so that few tokens
waste little of that unit; the other operand is put into the order in which weights are unpacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import BackendUnsupported
from common.ops.act import Activation
from common.ops.moe import triton_split
from common.ops.moe.grouping import Tiling, fitted, group
from common.ops.moe.stack import ExpertStack
from common.ops.moe.triton_group import MOST, group_few
from common.ops.moe.triton_tile import activated, outputs_of
from common.ops.quant.triton import GROUP, KINDS, LARGEST_SCALE, weights_tile
from common.ops.rows import STEP_TILE

FIXED_LOAD = 48  # rows of an expert that a prompt's fixed tiles are made for; no tail there


@triton.jit
def _places(
    x_row, source_ptr, begin, end, k_of_row, SKIP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Where `BM` rows of a block are read, after its first `SKIP`, and which of them there are:
    in 32 bits, which saves registers, counted from where the block begins or GATED from x.
    """
    place = SKIP + tl.arange(0, BM)
    live = begin + place < end
    if GATED:
        place = tl.load(source_ptr + begin + place, mask=live, other=0).to(tl.int32) // k_of_row
    return place[:, None] * x_row + tl.arange(0, BK)[None, :], live


@triton.jit
def _sums(
    w_at, s_at, x_ptr, x_at, live, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights by rows: [BN, BM]."""
    acc = tl.zeros([BN, BM], tl.float32)
    for _ in tl.range(0, K // BK, num_stages=STAGES):
        x = tl.trans(tl.load(x_ptr + x_at, mask=live[:, None], other=0.0))
        w = weights_tile(w_at, s_at, BN, BK, DTYPE, FAST)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK // 8
        s_at += BK // 32
    return acc


@triton.jit
def _sums_of_two(
    w_at, s_at, x_ptr, x_at, live, y_at, left, K: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with `BT` more rows, for which weights are not unpacked again."""
    acc = tl.zeros([BN, BM], tl.float32)
    tail = tl.zeros([BN, BT], tl.float32)
    for _ in tl.range(0, K // BK, num_stages=STAGES):
        x = tl.trans(tl.load(x_ptr + x_at, mask=live[:, None], other=0.0))
        y = tl.trans(tl.load(x_ptr + y_at, mask=left[:, None], other=0.0))
        w = weights_tile(w_at, s_at, BN, BK, DTYPE, FAST)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        tail = tl.dot(w, y, tail, input_precision=PRECISION)
        x_at += BK
        y_at += BK
        w_at += BK // 8
        s_at += BK // 32
    return acc, tail


@triton.jit
def _store(
    sums, out_ptr, source_ptr, begin, end, n, beta: tl.constexpr, linear_beta: tl.constexpr,
    N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr, SITU: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    row = begin + tl.arange(0, BM)
    live = row < end
    if GATED:
        out = activated(sums, beta, linear_beta, BN, BM, SITU, FAST)
        target = row.to(tl.int64)
        j = n % GROUP  # as `arrange` does
        n = n - j + (j // 8 % 4) * 32 + (j // 2 % 2) * 16 + (j % 2) * 8 + (j // 32) * 2 + j // 4 % 2
    else:
        out = sums
        target = tl.load(source_ptr + row, mask=live, other=0).to(tl.int64)
    out_at = out_ptr + target[None, :] * N + n[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live[None, :])


@triton.jit(do_not_specialize=["experts"])
def moe_kernel(
    x_ptr, x_row, w_ptr, w_expert, s_ptr, s_expert, out_ptr, source_ptr, expert_ptr, begin_ptr,
    offset_ptr, beta: tl.constexpr, linear_beta: tl.constexpr, k_of_row, experts,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, GATED: tl.constexpr, SITU: tl.constexpr, STAGES: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows * tiles. GATED: rows N.. of the weights make the second factor.

    A block has up to BM + BT rows of one expert. What is beyond BM is a product of its own width,
    BT; up to BT rows are one of that width alone.
    """
    tiles: tl.constexpr = 2 * N // BN if GATED else N // BN
    block = tl.program_id(0) // tiles
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert >= experts:
        return
    begin, end = tl.load(begin_ptr + block), tl.load(offset_ptr + expert + 1)
    wide, n = outputs_of(tl.program_id(0) % tiles, N, BN, GATED)
    w_at = w_ptr + expert * w_expert + wide[:, None] * (K // 8) + tl.arange(0, BK // 8)[None, :]
    s_at = s_ptr + expert * s_expert + wide[:, None] * (K // 32) + tl.arange(0, BK // 32)[None, :]
    if not GATED:
        x_ptr += begin * x_row
    after = begin + BM  # of the tail, if there is one
    if BT == 0:
        x_at, live = _places(x_row, source_ptr, begin, end, k_of_row, 0, BM, BK, GATED)
        acc = _sums(w_at, s_at, x_ptr, x_at, live, K, BN, BM, BK, STAGES, DTYPE, FAST, PRECISION)
    else:
        end = tl.minimum(end, after + BT)
        acc, tail = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BT], tl.float32)
        if end - begin <= BT:
            y_at, left = _places(x_row, source_ptr, begin, end, k_of_row, 0, BT, BK, GATED)
            tail = _sums(
                w_at, s_at, x_ptr, y_at, left, K, BN, BT, BK, STAGES, DTYPE, FAST, PRECISION
            )
            after = begin
        else:
            x_at, live = _places(x_row, source_ptr, begin, end, k_of_row, 0, BM, BK, GATED)
            if end <= after:
                acc = _sums(
                    w_at, s_at, x_ptr, x_at, live, K, BN, BM, BK, STAGES, DTYPE, FAST, PRECISION,
                )  # fmt: skip
            else:
                y_at, left = _places(x_row, source_ptr, begin, end, k_of_row, BM, BT, BK, GATED)
                acc, tail = _sums_of_two(
                    w_at, s_at, x_ptr, x_at, live, y_at, left, K, BN, BM, BT, BK, STAGES, DTYPE,
                    FAST, PRECISION,
                )  # fmt: skip
        if end > after:
            _store(
                tail, out_ptr, source_ptr, after, end, n, beta, linear_beta, N, BN, BT, GATED, SITU,
                FAST,
            )  # fmt: skip
    if after > begin:
        _store(
            acc, out_ptr, source_ptr, begin, end, n, beta, linear_beta, N, BN, BM, GATED, SITU, FAST
        )


@triton.jit
def combine_kernel(
    chosen_ptr, weight_ptr, out_ptr, TOP: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, Z / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        value = tl.load(chosen_ptr + (row * TOP + j) * Z + at, mask=at < Z, other=0.0)
        total += tl.load(weight_ptr + row * TOP + j) * value.to(tl.float32)
    tl.store(out_ptr + row * Z + at, total.to(out_ptr.dtype.element_ty), mask=at < Z)


def tilings(rows_per_expert: float) -> tuple[Tiling, Tiling]:
    """Tiles of the gate-up and of the down product, by the expected rows of an expert: measured
    with loads that a router draws, so that a block has room for more than is expected.
    """
    if rows_per_expert <= 16:
        return (
            Tiling(rows=16, width=128, depth=128, stages=4, warps=4),
            Tiling(rows=16, width=128, depth=256, stages=3, warps=4),
        )
    tiling = Tiling(rows=128, width=256, depth=128, stages=3, warps=8)
    if rows_per_expert <= 24:
        tiling = Tiling(rows=32, width=128, depth=128, stages=3, warps=4)
        return tiling, dataclasses.replace(tiling, registers=128)
    if rows_per_expert <= 42:
        tiling = Tiling(rows=32, tail=16, width=128, depth=128, stages=3, warps=4)
    elif rows_per_expert <= 54:
        tiling = Tiling(rows=64, width=128, depth=128, stages=3, warps=4)
    elif rows_per_expert <= 110 or 134 < rows_per_expert <= 230:
        tiling = Tiling(rows=64, tail=32, width=256, depth=128, stages=3, warps=8)
    return tiling, tiling


def arrange(x: Tensor) -> Tensor:
    """Put each 128 neighbours of [N, Z] into the order in which threads hold unpacked weights."""
    parts = x.view(x.shape[0], -1, 4, 4, 2, 2, 2)
    return parts.permute(0, 1, 3, 5, 6, 2, 4).reshape(x.shape)


def unsupported(stack: ExpertStack) -> str | None:
    """Why these kernels cannot serve the stack, or None; reads every scale, so call it once."""
    if stack.w13_scale is None or stack.w2_scale is None:
        return "the experts are not packed as MXFP4"
    width, depth = stack.w2.shape[1], stack.w2.shape[2] * 2
    if width % 128 or depth % 128:
        return f"experts of {width} x {depth} are not multiples of 128"
    largest = max(int(stack.w13_scale.max()), int(stack.w2_scale.max()))
    if largest > LARGEST_SCALE:
        return f"a scale of {largest} passes {LARGEST_SCALE}"
    return None


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, stack: ExpertStack, activation: Activation,
    tile: int | None, *, tiles: tuple[Tiling, Tiling] | None = None,
) -> Tensor:  # fmt: skip
    """See `common.ops.moe.experts`; with a `tile` the tiles do not depend on the rows."""
    width = stack.w2.shape[1]
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    if tile is not None:
        tiles = tiles or tilings(1 if tile <= STEP_TILE else FIXED_LOAD)
    if tiles is None and triton_split.serves(x, ids, stack):
        chosen = triton_split.products(x, ids, stack, activation)()
    else:
        chosen = products(x, ids, stack, activation, tiles=tiles)()
    block = min(1024, triton.next_power_of_2(width))
    combine_kernel[(x.shape[0], triton.cdiv(width, block))](
        chosen, weights, out, TOP=ids.shape[1], Z=width, BLOCK=block,
        enable_fp_fusion=False,  # as in the definition: see `common.ops.exchange.triton.add_up`
    )  # fmt: skip
    return out


def products(
    x: Tensor, ids: Tensor, stack: ExpertStack, activation: Activation, *,
    tiles: tuple[Tiling, Tiling] | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Group the choices; what is returned makes both products and gives [N * k, Z], by choice.

    Raises:
        BackendUnsupported: the experts are not packed, or the rows pass 32-bit offsets.
    """
    if stack.w13_scale is None or stack.w2_scale is None:
        raise BackendUnsupported("the Triton experts read packed MXFP4 only; use the reference")
    if x.numel() >= 2**31:
        raise BackendUnsupported(
            f"the Triton experts read fewer than 2^31 values a pass, these are {x.numel()}; pass "
            "fewer rows at once"
        )
    width, inner, count = stack.w2.shape[1], stack.w2.shape[2] * 2, stack.num_experts
    up, down = tiles or tilings(ids.numel() / count)
    up, down = fitted(up, 2 * inner, width), fitted(down, width, inner)
    sort = group_few if ids.numel() <= MOST else group
    source, expert, begin, offsets = sort(ids, count, up.rows + up.tail)
    hidden = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    chosen = torch.empty((ids.numel(), width), dtype=x.dtype, device=x.device)
    w13, w2, kind = stack.w13.view(torch.int32), stack.w2.view(torch.int32), KINDS[x.dtype]
    arranged = arrange(x)

    def multiply(
        t: Tiling, gated: bool, left: Tensor, w: Tensor, s: Tensor, target: Tensor
    ) -> None:
        n, depth = target.shape[1], left.shape[1]
        moe_kernel[(expert.shape[0] * ((2 * n if gated else n) // t.width),)](
            left, left.stride(0), w, w.stride(0), s, s.stride(0), target, source, expert, begin,
            offsets, activation.beta, activation.linear_beta or 0.0, ids.shape[1], count,
            N=n, K=depth, BN=t.width, BM=t.rows, BT=t.tail, BK=t.depth, GATED=gated,
            SITU=activation.kind == "situ", STAGES=t.stages, DTYPE=kind,
            FAST=x.is_cuda and kind == tl.bfloat16,
            PRECISION="tf32" if kind == tl.bfloat16 else "ieee",
            num_warps=t.warps, maxnreg=t.registers,
        )  # fmt: skip

    def both() -> Tensor:
        assert stack.w13_scale is not None and stack.w2_scale is not None
        multiply(up, True, arranged, w13, stack.w13_scale, hidden)
        multiply(down, False, hidden, w2, stack.w2_scale, chosen)
        return chosen

    return both
