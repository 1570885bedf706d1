"""Activations in torch, written as their formulas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `common.ops.act.situ`."""
    g, u = gate.float(), up.float()
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `common.ops.act.swiglu`."""
    return functional.silu(gate) * up
