"""Routing and experts in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from common.ops.act import Activation, activate
from common.ops.moe.stack import ExpertStack
from common.ops.quant.reference import unpack_mxfp4
from common.ops.rows import STEP_TILE
from common.ops.rows.reference import linear

LANES = 32  # floats of the widest vector loop; elementwise widths are multiples of it
FEW = 32  # so many experts a device multiplies all on every row, rather than ask which were chosen


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """See `common.ops.moe.route`."""
    count = logits.shape[-1]
    # A sigmoid's last bit depends on whether it ran in a vector loop or in its tail: no tails.
    scores = torch.sigmoid(functional.pad(logits, (0, -count % LANES)))[:, :count]
    biased = scores + bias
    if num_groups > 1:
        grouped = biased.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, value=True)
        biased = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = biased.topk(top_k, -1).indices.sort(-1).values
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: ExpertStack,
    activation: Activation,
    tile: int | None,
) -> Tensor:
    """See `common.ops.moe.experts`."""
    chosen = x.new_empty(*ids.shape, stack.w2.shape[1])  # [N, k, Z]
    top = ids.shape[1]
    is_narrow = stack.num_experts <= 8 * top and (tile or len(x)) <= STEP_TILE
    if is_unasking(stack, top) if x.is_cuda else stack.w13_scale is None and is_narrow:
        _all(x, ids, stack, activation, tile, chosen)
    else:
        _some(x, ids, stack, activation, tile and STEP_TILE, chosen)
    total = weights[:, :1] * chosen[:, 0].float()
    for j in range(1, top):
        total = total + weights[:, j : j + 1] * chosen[:, j].float()
    return total.to(x.dtype)


def is_unasking(stack: ExpertStack, top: int) -> bool:
    """Whether a device computes `top` choices a row without asking the host which were made."""
    return stack.w13_scale is None and stack.num_experts <= max(FEW, 8 * top)


def _all(
    x: Tensor, ids: Tensor, stack: ExpertStack, act: Activation, tile: int | None, out: Tensor
) -> None:
    """Every expert on every row: more arithmetic, few calls; for few experts."""
    inner = activate(
        linear(x, stack.w13.flatten(0, 1), tile).unflatten(-1, (len(stack.w13), -1)), act
    )
    rows, height = len(x), tile or len(x)
    inner = functional.pad(inner, (0, 0, 0, 0, 0, -rows % height))
    down = stack.w2.transpose(1, 2)
    every = [torch.bmm(part.transpose(0, 1), down) for part in inner.split(height)]  # [E, tile, Z]
    flat = torch.cat(every, 1)[:, :rows].transpose(0, 1)
    known = ids.clamp(max=stack.num_experts - 1)
    out.copy_(flat.gather(1, known.unsqueeze(-1).expand(-1, -1, flat.shape[-1])))


def _some(
    x: Tensor, ids: Tensor, stack: ExpertStack, act: Activation, tile: int | None, out: Tensor
) -> None:
    """Each expert on the rows that chose it."""
    for expert in ids[ids < stack.num_experts].unique().tolist():
        rows, place = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = _weights(stack, expert, x.dtype)
        out[rows, place] = linear(activate(linear(x[rows], w13, tile), act), w2, tile)


def _weights(stack: ExpertStack, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if stack.w13_scale is None or stack.w2_scale is None:
        return stack.w13[expert], stack.w2[expert]
    return (
        unpack_mxfp4(stack.w13[expert], stack.w13_scale[expert], dtype),
        unpack_mxfp4(stack.w2[expert], stack.w2_scale[expert], dtype),
    )
