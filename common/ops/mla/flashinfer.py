"""Latent attention of one token a share through FlashInfer's paged kernel for Hopper.

FlashInfer divides the work before a pass, on the host, from the shares' lengths: `schedule`, once a
pass and for all its layers. A plan whose tensors stay where they are (a captured step's) keeps
buffers of its own, which a replay reads anew; others share one schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.config.spec import CHUNK, MlaSpec
from common.ops.plan import Steps
from common.ops.rows.reference import heads

WORKSPACE = 128 << 20  # bytes, as its documentation recommends


@dataclass(frozen=True, slots=True)
class _Kept:
    plan: Steps
    wrapper: Any
    tables: Tensor  # int32 [B * P], the plan's tables


class FlashInferSteps:
    """`common.ops.mla.attend_steps` as a body that owns FlashInfer's workspace."""

    def __init__(self, device: torch.device, spec: MlaSpec, dtype: torch.dtype) -> None:
        """Reserve the workspace; the kernels themselves are compiled at their first use."""
        self._spec, self._dtype = spec, dtype
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._passing = _Kept(_nothing(device), self._wrapper(), self._workspace)
        self._kept: dict[int, _Kept] = {}  # by the plan's identity; plans are kept, so it is one

    def schedule(self, plan: Steps, starts: Sequence[int], *, stays: bool = False) -> None:
        """Divide the work of a pass.

        Args:
            plan: of the pass.
            starts: the plan's, as the host knows them; negative for padding.
            stays: the plan's tensors will be filled again for later passes.
        """
        if self._workspace.is_cuda:  # an earlier plan may still leave the wrapper's host memory
            torch.cuda.current_stream(self._workspace.device).synchronize()
        if stays and id(plan) not in self._kept:
            self._kept[id(plan)] = self._keep(plan)
        batch, width = plan.tables.shape
        # A share's pages begin at its row of the tables; padding attends to one entry of page 0.
        first = torch.arange(batch + 1, dtype=torch.int32) * width
        lengths = torch.tensor([max(0, start) + 1 for start in starts], dtype=torch.int32)
        tables = plan.tables.clamp(min=0).flatten().to(torch.int32)
        kept = self._kept.get(id(plan))
        if kept is None:
            self._passing = kept = _Kept(plan, self._passing.wrapper, tables)
        spec = self._spec
        kept.wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32), first, tables, lengths, spec.num_heads,
            spec.kv_lora_rank, spec.rope_dim, CHUNK, False, spec.scale, self._dtype, self._dtype,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, pages: Tensor, layer: int, kv_b: Tensor, scale: float, plan: Steps,
        tile: int | None,
    ) -> Tensor:  # fmt: skip
        """See `common.ops.mla.attend_steps`; a pass that nobody scheduled asks the device."""
        rank, view = kv_b.shape[2], pages[:, layer]
        nope = q.shape[2] - pages.shape[3] + rank
        kept = self._kept.get(id(plan), self._passing)
        if kept.plan is not plan:
            self.schedule(plan, plan.starts.tolist())
            kept = self._passing
        latents = kept.wrapper.run(
            heads(q[..., :nope], kv_b[:, :nope], tile).contiguous(), q[..., nope:].contiguous(),
            view[..., :rank], view[..., rank:],
        )  # fmt: skip
        return heads(latents, kv_b[:, nope:].transpose(1, 2), tile)

    def _keep(self, plan: Steps) -> _Kept:
        batch = len(plan.slots)
        tables = torch.zeros_like(plan.tables, dtype=torch.int32).flatten()
        rows = [torch.zeros_like(tables[: batch + extra]) for extra in (1, 1, 0)]
        names = ("qo_indptr", "kv_indptr", "kv_len_arr")
        wrapper = self._wrapper(
            use_cuda_graph=True, kv_indices=tables, **dict(zip(names, rows, strict=True))
        )
        return _Kept(plan, wrapper, tables)

    def _wrapper(self, **options: Any) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-untyped,unused-ignore]

        return BatchMLAPagedAttentionWrapper(self._workspace, backend="fa3", **options)


def _nothing(device: torch.device) -> Steps:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Steps(slots=none, starts=none, tables=none.view(0, 0))
