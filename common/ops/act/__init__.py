"""Activations of the gated feed-forward networks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.ops.act import reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Which activation a checkpoint uses, with its constants."""

    kind: str  # "situ" or "silu"
    beta: float = 1.0
    linear_beta: float | None = None


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU: `[beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)]`.

    The sigmoid takes the raw gate, not the clipped one. fp32 throughout, rounded once.

    Args:
        gate: [..., F]; may be a strided half of a [..., 2F] tensor. F a multiple of 32.
        up: [..., F], same dtype.
        beta: clip of the gate.
        linear_beta: clip of `up`; None takes `up` as it is.

    Returns:
        [..., F], contiguous, dtype of `gate`.
    """
    return reference.situ(gate, up, beta=beta, linear_beta=linear_beta)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, for checkpoints with `hidden_act` "silu"; shapes as in `situ`."""
    return reference.swiglu(gate, up)


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """The configured activation of [..., 2F], gate in the first half; [..., F], same dtype."""
    gate, up = gate_up.chunk(2, -1)
    if activation.kind == "silu":
        return swiglu(gate, up)
    return situ(gate, up, beta=activation.beta, linear_beta=activation.linear_beta)
