"""Root-mean-square norms."""

from __future__ import annotations

from torch import Tensor

from common.ops.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in fp32, rounded once.

    Args:
        x: [..., D].
        weight: [D], any float dtype.
        eps: added to the mean of squares.

    Returns:
        [..., D], dtype of x.
    """
    return reference.rms_norm(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x) * sigmoid(gate)`: norm, weight, then gate; in fp32, rounded once.

    Args:
        x: [N, H, D], any float dtype; rounded to the dtype of `gate` before the norm.
        gate: [N, H, D], the raw gate; H * D a multiple of 32.
        weight: fp32 [D], one for all heads.
        eps: added to the mean of squares.

    Returns:
        [N, H, D], dtype of `gate`.
    """
    return reference.gated_rms_norm(x, gate, weight, eps)
