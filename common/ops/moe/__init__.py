"""Mixture of experts: the router's choice and the experts' weighted sum."""

from __future__ import annotations

from torch import Tensor

from common.ops.act import Activation
from common.ops.moe import reference
from common.ops.moe.stack import ExpertStack

__all__ = ["ExpertStack", "experts", "route"]


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased sigmoid scores; weigh them by the unbiased ones.

    With groups, a group's score is the sum of its two largest biased scores; the choice is made
    inside the `top_groups` best groups. Between equal scores the choice is torch's.

    Args:
        logits: fp32 [N, E].
        bias: fp32 [E], for the choice only.
        top_k: experts a row.
        num_groups: equal groups of neighbouring experts.
        top_groups: groups kept.
        renormalize: divide the weights by their sum.
        scaling: multiplies the weights last.

    Returns:
        Expert ids int64 [N, top_k], ascending, and their weights fp32 [N, top_k].
    """
    return reference.route(
        logits,
        bias,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scaling=scaling,
    )


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: ExpertStack,
    activation: Activation,
    tile: int | None,
) -> Tensor:
    """`sum_e weights[e] * expert_e(x)`, summed in fp32 in ascending order of ids, rounded once.

    Args:
        x: [N, Z].
        ids: int64 [N, k], ascending; the number of experts stands for none, and what a row with
            none adds up to is not defined.
        weights: fp32 [N, k].
        stack: the layer's experts; packed ones are unpacked to the dtype of `x`.
        activation: between the two products.
        tile: rows of one product; None multiplies all rows of an expert at once.

    Returns:
        [N, Z], same dtype.
    """
    return reference.experts(x, ids, weights, stack, activation, tile)
