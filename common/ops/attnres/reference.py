"""The attention-residual mixture in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.norm.reference import rms_norm


def read(
    prefix: Tensor,
    bank: Tensor,
    readable: int,
    score: Tensor,
    *,
    eps: float,
    pending: Tensor | None = None,
    norm: Tensor | None = None,
    write_row: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `common.ops.attnres.read`."""
    p = prefix if pending is None else prefix + pending
    out = p if readable == 0 else _mix(bank[:, :readable], p, score, eps)
    if write_row is not None:
        bank[:, write_row] = p
    return (out if norm is None else rms_norm(out, norm, eps)), p


def _mix(blocks: Tensor, prefix: Tensor, score: Tensor, eps: float) -> Tensor:
    """blocks [N, n, D] and prefix [N, D] -> [N, D]."""
    sources = [*(block.float() for block in blocks.unbind(1)), prefix.float()]
    scores = [(v * score).sum(-1) * torch.rsqrt(v.pow(2).mean(-1) + eps) for v in sources]
    weights = torch.stack(scores, -1).softmax(-1)  # [N, n + 1]
    mixed = weights[:, :1] * sources[0]
    for j in range(1, len(sources)):
        mixed = mixed + weights[:, j : j + 1] * sources[j]
    return mixed.to(prefix.dtype)
