"""Latent attention in torch, one share at a time, keys padded to whole pages."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.plan import Chunks, Steps
from common.ops.rows.reference import heads, linear


def attend_chunks(
    q: Tensor,
    pages: Tensor,
    layer: int,
    kv_b: Tensor,
    scale: float,
    plan: Chunks,
    tile: int | None,
) -> Tensor:
    """See `common.ops.mla.attend_chunks`."""
    rows, num_heads = q.shape[1], q.shape[2]
    out = q.new_empty(*q.shape[:3], kv_b.shape[1] - q.shape[3] + pages.shape[3] - kv_b.shape[2])
    bounds, starts, lengths = plan.first.tolist(), plan.starts.tolist(), plan.lengths.tolist()
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    for share, table in enumerate(plan.tables):
        begin, end = bounds[share], bounds[share + 1]
        before = starts[share] // rows
        total = starts[share] + (end - begin - 1) * rows + lengths[end - 1]
        entries = _entries(pages, layer, table[: before + end - begin], total)
        keys, values = _expand(entries, kv_b, num_heads, q.shape[3], tile)  # [H, tokens, .]
        for c in range(begin, end):
            seen = (before + c - begin + 1) * rows
            score = q[c].transpose(0, 1) @ keys[:, :seen].transpose(1, 2)  # [H, 64, seen]
            score = score.float() * scale
            score[..., seen - rows :].masked_fill_(later, -torch.inf)
            weights = score.softmax(-1).to(q.dtype)
            out[c] = (weights @ values[:, :seen]).transpose(0, 1)
    return out


def attend_steps(
    q: Tensor,
    pages: Tensor,
    layer: int,
    kv_b: Tensor,
    scale: float,
    plan: Steps,
    tile: int | None,
) -> Tensor:
    """See `common.ops.mla.attend_steps`."""
    rank = kv_b.shape[2]
    nope = q.shape[2] - pages.shape[3] + rank
    absorbed = torch.cat([heads(q[..., :nope], kv_b[:, :nope], tile), q[..., nope:]], -1)
    latents = q.new_zeros(*q.shape[:2], rank)
    for share, (start, table) in enumerate(zip(plan.starts.tolist(), plan.tables, strict=True)):
        if start < 0:
            continue  # padding
        entries = _entries(pages, layer, table[: start // pages.shape[2] + 1], start + 1)
        score = (absorbed[share] @ entries.t()).float() * scale  # [H, tokens]
        score[:, start + 1 :] = -torch.inf
        latents[share] = score.softmax(-1).to(q.dtype) @ entries[:, :rank]
    return heads(latents, kv_b[:, nope:].transpose(1, 2), tile)


def _entries(pages: Tensor, layer: int, table: Tensor, total: int) -> Tensor:
    """A share's entries [pages * 64, W]; those at and beyond `total` are zero."""
    entries = pages[table, layer].flatten(0, 1)
    entries[total:] = 0
    return entries


def _expand(
    entries: Tensor, kv_b: Tensor, num_heads: int, key_width: int, tile: int | None
) -> tuple[Tensor, Tensor]:
    """Entries [T, W] -> keys [H, T, nope + rope] and values [H, T, V]."""
    rank = kv_b.shape[2]
    nope = key_width - entries.shape[1] + rank
    wide = linear(entries[:, :rank], kv_b.flatten(0, 1), tile).unflatten(-1, (num_heads, -1))
    shared = entries[:, rank:].unsqueeze(1).expand(-1, num_heads, -1)
    keys = torch.cat([wide[..., :nope], shared], -1)
    return keys.transpose(0, 1).contiguous(), wide[..., nope:].transpose(0, 1).contiguous()
