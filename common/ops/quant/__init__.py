"""The checkpoint's quantised weight formats."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.quant import reference


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 to values; exact in bf16 and fp32 within their exponent range.

    Args:
        packed: uint8 [..., N / 2]; the low nibble is the even element.
        scale: uint8 [..., N / 32]; 2^(scale - 127) multiplies 32 neighbours, 255 is NaN.
        dtype: of the result.

    Returns:
        [..., N].
    """
    return reference.unpack_mxfp4(packed, scale, dtype)


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values to MXFP4, scale = 2^(floor(log2(largest magnitude)) - 2) per 32 neighbours.

    Args:
        weight: fp32 [..., N], N a multiple of 32.

    Returns:
        Packed uint8 [..., N / 2] and scale uint8 [..., N / 32].
    """
    return reference.pack_mxfp4(weight)


def unpack_fp8(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 in blocks of 128 x 128 to values.

    Args:
        weight: float8_e4m3fn [O, K].
        scale_inv: fp32 [ceil(O / 128), ceil(K / 128)]; multiplies its block.
        dtype: of the result.

    Returns:
        [O, K].
    """
    return reference.unpack_fp8(weight, scale_inv, dtype)
