"""Latent attention of one token a share through FlashInfer's paged kernel for Hopper.

FlashInfer works out a schedule before it runs: once a pass, shared by all layers. It reads the
shares' lengths on the host, so a step with this body cannot be captured into a CUDA graph; the
Triton body can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.plan import Steps
from common.ops.rows.reference import heads

WORKSPACE = 128 << 20  # bytes, as its documentation recommends


class FlashInferSteps:
    """`common.ops.mla.attend_steps` as a body that owns FlashInfer's workspace."""

    def __init__(self, device: torch.device) -> None:
        """Reserve the workspace; the kernels themselves are compiled at their first use."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-untyped,unused-ignore]

        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        self._planned: tuple[Steps, int] | None = None

    def __call__(
        self, q: Tensor, pages: Tensor, layer: int, kv_b: Tensor, scale: float, plan: Steps,
        tile: int | None,
    ) -> Tensor:  # fmt: skip
        """See `common.ops.mla.attend_steps`."""
        rank, view = kv_b.shape[2], pages[:, layer]
        nope = q.shape[2] - pages.shape[3] + rank
        if self._planned is None or self._planned[0] is not plan or self._planned[1] != q.shape[1]:
            self._schedule(q, view, rank, scale, plan)
        latents = self._wrapper.run(
            heads(q[..., :nope], kv_b[:, :nope], tile).contiguous(), q[..., nope:].contiguous(),
            view[..., :rank], view[..., rank:],
        )  # fmt: skip
        return heads(latents, kv_b[:, nope:].transpose(1, 2), tile)

    def _schedule(self, q: Tensor, view: Tensor, rank: int, scale: float, plan: Steps) -> None:
        tokens = view.shape[1]
        lengths = (plan.starts + 1).to(torch.int32)
        counts = (lengths + tokens - 1) // tokens
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        owned = torch.arange(plan.tables.shape[1], device=q.device) < counts.unsqueeze(1)
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        self._wrapper.plan(
            rows, ends, plan.tables[owned].to(torch.int32), lengths, q.shape[1], rank,
            view.shape[2] - rank, tokens, False, scale, q.dtype, view.dtype,
        )  # fmt: skip
        self._planned = (plan, q.shape[1])
