"""Matrix products whose rows do not see each other."""

from __future__ import annotations

from torch import Tensor

from common.ops.rows import reference

STEP_TILE = 8  # rows of one product when every row is another request's


def linear(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """`x @ weight.T`, in fixed row tiles, so that a row's bits depend on that row alone.

    A library picks its inner loops by the number of rows, and so a row's last bits change with
    its neighbours. Products of one fixed height, zero-padded, do not have that freedom.

    Args:
        x: [N, K].
        weight: [O, K], same dtype.
        tile: rows of one product; None multiplies all rows at once (fast on GPUs, not invariant).

    Returns:
        [N, O], same dtype.
    """
    return reference.linear(x, weight, tile)


def widened(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """`linear` of inputs as they are by fp32 weights: products and sums in fp32.

    Args:
        x: [N, K], fp32 or narrower.
        weight: fp32 [O, K].
        tile: as for `linear`.

    Returns:
        fp32 [N, O].
    """
    return reference.linear(x.float(), weight, tile)


def heads(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """One product a head, `x[:, h] @ weight[h]`, in row tiles like `linear`.

    Args:
        x: [N, H, K].
        weight: [H, K, O], same dtype.
        tile: rows of one product; None multiplies all rows at once.

    Returns:
        [N, H, O], same dtype.
    """
    return reference.heads(x, weight, tile)
