"""The short convolution in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from common.ops.plan import Chunks, Steps


def conv_chunks(raw: Tensor, weight: Tensor, pool: Tensor, layer: int, plan: Chunks) -> Tensor:
    """See `common.ops.conv.conv_chunks`."""
    kept, rows = weight.shape[0] - 1, raw.shape[1]
    out = raw.new_empty(raw.shape)
    bounds, lengths = plan.first.tolist(), plan.lengths.tolist()
    for share, slot in enumerate(plan.slots.tolist()):
        begin, end = bounds[share], bounds[share + 1]
        window = pool[slot, layer].permute(1, 2, 0, 3)  # [taps - 1, 3, H, D]
        padded = torch.cat([window, raw[begin:end].flatten(0, 1)])
        out[begin:end] = _convolve(padded, weight).view(end - begin, *raw.shape[1:])
        last = (end - begin - 1) * rows + lengths[end - 1]  # tokens of this pass
        pool[slot, layer] = padded[last : last + kept].permute(2, 0, 1, 3)
    return out


def conv_steps(raw: Tensor, weight: Tensor, pool: Tensor, layer: int, plan: Steps) -> Tensor:
    """See `common.ops.conv.conv_steps`."""
    rows, real = plan.real()
    if real is not plan:
        out = torch.zeros_like(raw, memory_format=torch.contiguous_format)
        out[rows] = conv_steps(raw[rows], weight, pool, layer, real)
        return out
    window = pool[plan.slots, layer].permute(0, 2, 3, 1, 4)  # [B, taps - 1, 3, H, D]
    padded = torch.cat([window, raw.unsqueeze(1)], 1)
    pool[plan.slots, layer] = padded[:, 1:].permute(0, 3, 1, 2, 4)
    total = padded[:, 0].float() * weight[0]
    for tap in range(1, weight.shape[0]):
        total = total + padded[:, tap].float() * weight[tap]
    return functional.silu(total).to(raw.dtype)


def _convolve(padded: Tensor, weight: Tensor) -> Tensor:
    """padded [taps - 1 + T, 3, H, D] -> [T, 3, H, D]."""
    taps = weight.shape[0]
    rows = padded.shape[0] - taps + 1
    wide = padded.float()
    total = wide[:rows] * weight[0]
    for tap in range(1, taps):
        total = total + wide[tap : tap + rows] * weight[tap]
    return functional.silu(total).to(padded.dtype)
