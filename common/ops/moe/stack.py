"""The routed experts of one layer as stacked tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """E experts of width F that read and write Z values: w2 act(w1 z, w3 z).

    Dense, or, where the scales are there, packed MXFP4 (two values a byte, low nibble first, one
    scale for 32 values).
    """

    w13: Tensor  # [E, 2F, Z], w1 above w3; packed: uint8 [E, 2F, Z / 2]
    w2: Tensor  # [E, Z, F]; packed: uint8 [E, Z, F / 2]
    w13_scale: Tensor | None = None  # uint8 [E, 2F, Z / 32]
    w2_scale: Tensor | None = None  # uint8 [E, Z, F / 32]
    w13_base: Tensor | None = None  # uint8 [E, 2F], see `triton_split.based`
    w2_base: Tensor | None = None  # uint8 [E, Z]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w13.shape[0]
