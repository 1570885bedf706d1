"""The values that MXFP4 stores, for training with them."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.quant.reference import GROUP


def rounded(weight: Tensor) -> Tensor:
    """The nearest values of MXFP4, groups of 32 along the last axis; fp32.

    The scale is the least power of two that puts a group's largest value at 7 or below, so the top
    code, 6, clips a sixth at most. The largest rounded value is then 4 or 6 times the scale, and
    `pack_mxfp4`, which takes the scale from the largest value, stores the result without loss.
    """
    groups = weight.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 7)))
    scaled = groups / scale
    size = scaled.abs().clamp_max(6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.sign(scaled) * torch.round(size / step) * step * scale).flatten(-2)


def straight_through(weight: Tensor, on: Tensor) -> Tensor:
    """`weight` with `on` 0, its rounded values with `on` 1; gradients pass as if unrounded."""
    return weight + (rounded(weight) - weight).detach() * on
