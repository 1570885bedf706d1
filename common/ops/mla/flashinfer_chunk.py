"""Causal latent attention of chunks through FlashInfer's prefill kernel for Hopper.

Keys and values are expanded for the whole context, as `triton_chunk` does; keys get the part that
heads share. Queries and keys of a share are padded to whole chunks, so that the last query sees the
last key, and what lies behind its end is zero: no real query sees it. FlashInfer works out a
schedule before it runs, once a pass, from lengths that it reads on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common.ops.mla.flashinfer import WORKSPACE
from common.ops.plan import Chunks
from common.ops.rows.reference import linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What all layers of a pass share."""

    plan: Chunks
    heads: int
    pages: Tensor  # int64 [all pages of the shares, in order]
    live: Tensor  # bool [pages * 64, 1], whether a place holds a token


class FlashInferChunks:
    """`common.ops.mla.attend_chunks` as a body that owns FlashInfer's workspace."""

    def __init__(self, device: torch.device) -> None:
        """Reserve the workspace; the kernels themselves are compiled at their first use."""
        from flashinfer.prefill import (  # type: ignore[import-untyped,unused-ignore]
            BatchPrefillWithRaggedKVCacheWrapper,
        )

        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
        self._pass: _Pass | None = None

    def __call__(
        self, q: Tensor, pages: Tensor, layer: int, kv_b: Tensor, scale: float, plan: Chunks,
        tile: int | None,
    ) -> Tensor:  # fmt: skip
        """See `common.ops.mla.attend_chunks`."""
        chunks, rows, heads, width = q.shape
        rank, rope = kv_b.shape[2], pages.shape[3] - kv_b.shape[2]
        nope, value = width - rope, kv_b.shape[1] - width + rope
        if not chunks:
            return q.new_empty(0, rows, heads, value)
        held = self._pass
        if held is None or held.plan is not plan or held.heads != heads:
            held = self._pass = self._schedule(q, value, scale, plan)
        entries = pages[held.pages, layer].flatten(0, 1)
        entries = entries.masked_fill(~held.live, 0.0)
        flat = kv_b.flatten(0, 1)
        latents = entries[:, :rank]
        wide = functional.linear(latents, flat) if tile is None else linear(latents, flat, tile)
        wide = wide.unflatten(-1, (heads, nope + value))
        keys = torch.empty((len(wide), heads, width), dtype=q.dtype, device=q.device)
        keys[..., :nope] = wide[..., :nope]
        keys[..., nope:] = entries[:, None, rank:]
        out: Tensor = self._wrapper.run(
            q.reshape(chunks * rows, heads, width), keys, wide[..., nope:]
        )
        return out.view(chunks, rows, heads, value)

    def _schedule(self, q: Tensor, value: int, scale: float, plan: Chunks) -> _Pass:
        _, rows, heads, width = q.shape
        before = plan.starts // rows  # pages
        counts = before + plan.first.diff()
        ends = functional.pad(counts.cumsum(0), (1, 0))
        owned = torch.arange(plan.tables.shape[1], device=q.device) < counts.unsqueeze(1)
        live = torch.full((int(ends[-1]),), rows, device=q.device)
        live[ends[1:] - 1] = plan.lengths[plan.first[1:] - 1]
        is_live = torch.arange(rows, device=q.device) < live.unsqueeze(1)
        self._wrapper.plan(
            (plan.first * rows).int(), (ends * rows).int(), heads, heads, width, head_dim_vo=value,
            causal=True, sm_scale=scale, q_data_type=q.dtype,
        )  # fmt: skip
        return _Pass(
            plan=plan, heads=heads, pages=plan.tables[owned], live=is_live.view(-1, 1)
        )  # fmt: skip
