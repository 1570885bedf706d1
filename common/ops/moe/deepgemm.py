"""FP8 experts: DeepGEMM's grouped products for Hopper, our quantisation and SiTU between them.

Weights are FP8 in squares of 128 with a float32 scale each, activations FP8 in rows of 128. Few
rows lie in a table of equal room for every expert, and products skip what is not used ("masked");
many lie one expert after another, padded to whole tiles ("contiguous"). DeepGEMM compiles a kernel
at the first use of a shape.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from common.errors import BackendUnsupported
from common.ops.act import Activation
from common.ops.moe.stack import ExpertStack
from common.ops.moe.triton_fp8 import activate_kernel, gather_kernel, sum_kernel
from common.ops.quant.reference import BLOCK, unpack_mxfp4

HOPPER = (9, 0)
TILE = 128  # rows of a tile of the contiguous layout
MASKED_BYTES = 2 << 30  # of the first product's result, up to which the masked layout is used
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FP8


class Products(Protocol):
    """Grouped products: `out[rows of e] = a[rows of e] @ b[e].T`, both FP8 with their scales."""

    def masked(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, counts: Tensor,
        expected: int,
    ) -> None:  # fmt: skip
        """Operands [E, M, K], [E, M, K / 128], [E, N, K], [E, N / 128, K / 128]; `counts` int32
        [E] of M rows are used, about `expected`."""

    def contiguous(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, experts: Tensor
    ) -> None:
        """Operands [M, K], [M, K / 128], and as above; `experts` int32 [M], -1 where unused, the
        same within every 128 rows."""


class DeepGemm:
    """DeepGEMM's products."""

    def __init__(self) -> None:
        """Load the library."""
        import deep_gemm  # type: ignore[import-not-found,unused-ignore]

        self._library: Any = deep_gemm

    def masked(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, counts: Tensor,
        expected: int,
    ) -> None:  # fmt: skip
        """See `Products`."""
        self._library.fp8_m_grouped_gemm_nt_masked(
            (a, a_scale), (b, b_scale), out, counts, expected
        )

    def contiguous(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, experts: Tensor
    ) -> None:
        """See `Products`."""
        self._library.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, experts)


def unavailable(device: torch.device) -> str | None:
    """Why DeepGEMM cannot serve on a device, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.cuda.get_device_capability(device) != HOPPER:
        return "its FP8 products with float32 scales are for Hopper only"
    for module in ("triton", "tvm_ffi", "deep_gemm"):
        if find_spec(module) is None:
            return f"{module} is not installed (sgl-deep-gemm 0.1.2 goes with torch 2.11)"
    return None


def ready(sides: tuple[int, int], device: torch.device, *, exact: bool) -> Fp8Experts:
    """The body for experts of these sides.

    Raises:
        BackendUnsupported: it cannot run here, or not with these shapes.
    """
    why = "its tiles change with the rows, which exact refuses" if exact else unavailable(device)
    if why is None and any(side % BLOCK for side in sides):
        why = f"experts of {sides[0]} x {sides[1]} are not multiples of {BLOCK}"
    if why:
        raise BackendUnsupported(
            f"model.ops is 'fp8', but DeepGEMM cannot serve: {why}; set it to 'auto'"
        )
    return Fp8Experts(DeepGemm())


def to_fp8(stack: ExpertStack) -> ExpertStack:
    """Round a stack's weights to FP8, packed MXFP4 ones too; one expert at a time.

    Raises:
        BackendUnsupported: a side of the experts is not a multiple of 128.
    """
    (w13, w13_scale), (w2, w2_scale) = (
        _rounded(stack.w13, stack.w13_scale), _rounded(stack.w2, stack.w2_scale)
    )  # fmt: skip
    return ExpertStack(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


def _rounded(weights: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    count, rows, columns = weights.shape
    columns *= 1 if scales is None else 2
    if rows % BLOCK or columns % BLOCK:
        raise BackendUnsupported(
            f"FP8 experts are cut in squares of {BLOCK}, theirs are {rows} x {columns}; set "
            "model.ops to 'auto'"
        )
    narrow = torch.empty((count, rows, columns), dtype=FP8, device=weights.device)
    shape = (count, rows // BLOCK, columns // BLOCK)
    scale = torch.empty(shape, dtype=torch.float32, device=weights.device)
    for e in range(count):
        wide = weights[e].float()
        if scales is not None:
            wide = unpack_mxfp4(weights[e], scales[e], torch.float32)
        squares = wide.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale[e] = squares.abs().amax((1, 3)).clamp(min=1e-30) / LARGEST
        narrow[e] = (squares / scale[e][:, None, :, None]).view(rows, columns).to(FP8)
    return narrow, scale


class Fp8Experts:
    """`common.ops.moe.experts` over stacks that `to_fp8` made; `tile` has no meaning here."""

    held = "fp8"  # what becomes of the experts in memory, whatever the checkpoint has

    def __init__(self, products: Products) -> None:
        """Bind the grouped products."""
        self._products = products

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, stack: ExpertStack, activation: Activation,
        tile: int | None, *, is_masked: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """See `common.ops.moe.experts`; `is_masked` chooses the layout, None by size."""
        if stack.w13.dtype != FP8 or stack.w13_scale is None or stack.w2_scale is None:
            raise BackendUnsupported(
                f"DeepGEMM multiplies by FP8 weights, these are {stack.w13.dtype}; pass them "
                "through to_fp8 first"
            )
        rows, top = ids.shape
        width, inner, count = stack.w2.shape[1], stack.w2.shape[2], stack.num_experts
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        room = -(-rows // 64) * 64  # an expert has a row once at most
        if is_masked is None:
            is_masked = count * room * 2 * inner * x.element_size() <= MASKED_BYTES
        place, layout = _masked(ids, count, room) if is_masked else _padded(ids, count)
        table = (count, room) if is_masked else (len(layout),)
        expected = -(-ids.numel() // count)

        def operand(depth: int) -> tuple[Tensor, Tensor]:
            scale = torch.empty((*table[:-1], depth // BLOCK, table[-1]), device=x.device)
            return torch.empty((*table, depth), dtype=FP8, device=x.device), scale.mT

        def multiply(a: tuple[Tensor, Tensor], b: Tensor, b_scale: Tensor) -> Tensor:
            result = torch.empty((*table, b.shape[1]), dtype=x.dtype, device=x.device)
            if is_masked:
                self._products.masked(*a, b, b_scale, result, layout, expected)
            else:
                self._products.contiguous(*a, b, b_scale, result, layout)
            return result

        def sizes(depth: int) -> dict[str, int]:
            return {"K": depth, "G": triton.next_power_of_2(depth // BLOCK)}

        first, second = operand(width), operand(inner)
        grid = (ids.numel(),)
        gather_kernel[grid](x, x.stride(0), place, *first, table[-1], top, **sizes(width))
        wide = multiply(first, stack.w13, stack.w13_scale)
        activate_kernel[grid](
            wide, place, *second, table[-1], activation.beta, activation.linear_beta or 0.0,
            SITU=activation.kind == "situ", FAST=x.is_cuda, **sizes(inner),
        )  # fmt: skip
        made, block = multiply(second, stack.w2, stack.w2_scale), 1024
        sum_kernel[(rows, triton.cdiv(width, block))](
            made, place, weights, out, TOP=top, Z=width, BLOCK=block
        )
        return out


def _masked(ids: Tensor, count: int, room: int) -> tuple[Tensor, Tensor]:
    """Each choice's place in a table of equal rooms, int64 [N * k], and rows used, int32 [E]."""
    source, ordered, offsets = _sorted(ids, count)
    place = torch.empty_like(source)
    place[source] = ordered * room + torch.arange(len(source), device=ids.device) - offsets[ordered]
    return place, offsets.diff().int()


def _padded(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each choice's place where experts follow each other, padded to tiles, and the expert of every
    place there can be, int32, -1 behind the last."""
    source, ordered, offsets = _sorted(ids, count)
    padded = (offsets.diff() + TILE - 1) // TILE * TILE
    ends = padded.cumsum(0)
    place = torch.empty_like(source)
    number = torch.arange(len(source), device=ids.device)
    place[source] = (ends - padded - offsets[:-1])[ordered] + number
    most = -(-(len(source) + min(count, len(source)) * (TILE - 1)) // TILE) * TILE
    expert = torch.searchsorted(ends, torch.arange(most, device=ids.device), right=True)
    return place, torch.where(expert < count, expert, -1).int()


def _sorted(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices by expert: which, their experts, and where each expert begins, int64 [E + 1]."""
    ordered, source = ids.flatten().sort(stable=True)
    edges = torch.arange(count + 1, device=ids.device)
    return source, ordered, torch.searchsorted(ordered, edges)
