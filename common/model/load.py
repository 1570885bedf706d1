"""How many rows chose each expert, counted on the device; nothing is read on the host meanwhile.

For a model that is alone; ranks of a group count in their team. One count a pass, not a layer: a
step of many small kernels must not get many more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.config.spec import TextSpec


class ExpertLoad:
    """Counts since the start: int64 [MoE layers, experts]."""

    def __init__(self, spec: TextSpec, device: torch.device) -> None:
        """All are zero."""
        layers, experts = len(spec.moe_layers), spec.moe.num_experts
        self.counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)

    def count(self, chosen: Sequence[Tensor], keep: Tensor) -> None:
        """Add a pass.

        Args:
            chosen: int64 [N, k] of each MoE layer, the experts that rows chose.
            keep: bool [N], false for padding.
        """
        ids = torch.stack(tuple(chosen))  # [layers, N, k]
        real = keep.to(torch.int64).unsqueeze(1).expand(ids.shape)
        self.counts.scatter_add_(1, ids.flatten(1), real.flatten(1))
