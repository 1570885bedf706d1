"""The router's choice in one launch: scores, the best k, their ids in order and their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import BackendUnsupported


@triton.jit
def route_kernel(
    logit_ptr, logit_row, bias_ptr, id_ptr, weight_ptr, scaling,
    E: tl.constexpr, TOP: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Between equal scores the lower id is chosen."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < E
    score = tl.sigmoid(tl.load(logit_ptr + row * logit_row + at, mask=live, other=0.0))
    left = score + tl.load(bias_ptr + at, mask=live, other=0.0)
    # What is no number must not leave ids unwritten: such a row chooses the first experts.
    left = tl.where(live & (left == left), left, float("-inf"))
    chosen = tl.zeros([BLOCK], tl.int1)
    for _ in tl.static_range(TOP):
        best = tl.max(left, 0)
        one = at == tl.min(tl.where((left == best) & (chosen == 0), at, BLOCK), 0)
        chosen = chosen | one
        left = tl.where(one, float("-inf"), left)
    total = 1.0
    if NORM:
        total = tl.sum(tl.where(chosen, score, 0.0), 0) + 1e-20
    place = row * TOP + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(id_ptr + place, at.to(tl.int64), mask=chosen)
    tl.store(weight_ptr + place, score / total * scaling, mask=chosen)


def route(
    logits: Tensor, bias: Tensor, *, top_k: int, num_groups: int = 1, top_groups: int = 1,
    renormalize: bool = True, scaling: float = 1.0, num_warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `common.ops.moe.route`; one group only."""
    if num_groups != 1:
        raise BackendUnsupported(
            f"the Triton router knows one group, not {num_groups}; use the reference"
        )
    rows, experts = logits.shape
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[(rows,)](
            logits, logits.stride(0), bias, ids, weights, scaling,
            E=experts, TOP=top_k, NORM=renormalize, BLOCK=triton.next_power_of_2(experts),
            num_warps=num_warps,
        )  # fmt: skip
    return ids, weights
