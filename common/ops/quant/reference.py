"""Quantised weight formats in torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32  # neighbours that share an MXFP4 scale
BLOCK = 128  # side of a square that shares an FP8 scale
POWERS = (*(2.0 ** (i - 127) for i in range(255)), float("nan"))


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `common.ops.quant.unpack_mxfp4`."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=packed.device)
    pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    wide = values[pairs.int()].unflatten(-1, (-1, GROUP))
    powers = torch.tensor(POWERS, device=packed.device)[scale.int()]
    unpacked: Tensor = (wide * powers.unsqueeze(-1)).flatten(-2).to(dtype)
    return unpacked


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `common.ops.quant.pack_mxfp4`."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 3  # floor(log2) is one less than frexp's exponent
    exponent = torch.where(largest > 0, exponent, -127).clamp(-127, 127)
    scaled = groups / torch.tensor(POWERS)[(exponent + 127)].unsqueeze(-1)
    borders = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
    code = torch.bucketize(scaled.abs(), borders)
    # At a border the even code wins.
    tie = (scaled.abs().unsqueeze(-1) == borders).any(-1)
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = (code | (torch.signbit(scaled).long() << 3)).flatten(-2).to(torch.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def unpack_fp8(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """See `common.ops.quant.unpack_fp8`."""
    rows, columns = weight.shape
    wide = scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * wide).to(dtype)
