"""Latent attention without rotation, over pages.

A page holds 64 tokens; a token's entry is [normed latent (rank) | raw shared key (rope)]. The key
of head h is [kv_b[h, :nope] latent | shared key], its value kv_b[h, nope:] latent. Entries at and
beyond a share's length are never read.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.mla import reference
from common.ops.plan import Chunks, Steps


def attend_chunks(
    q: Tensor,
    pages: Tensor,
    layer: int,
    kv_b: Tensor,
    scale: float,
    plan: Chunks,
    tile: int | None,
) -> Tensor:
    """Causal attention of every row over its share's tokens, in the expanded form.

    The latents of this pass were written before. Softmax in fp32.

    Args:
        q: [C, 64, H, nope + rope].
        pages: [pages, layers, 64, rank + rope], the pool, same dtype.
        layer: position among the pool's layers.
        kv_b: [H, nope + V, rank], same dtype.
        scale: of the scores.
        plan: where the chunks belong.
        tile: rows of one product while keys and values are expanded; None for all at once.

    Returns:
        [C, 64, H, V], same dtype; rows of padding are undefined but finite.
    """
    return reference.attend_chunks(q, pages, layer, kv_b, scale, plan, tile)


def attend_steps(
    q: Tensor,
    pages: Tensor,
    layer: int,
    kv_b: Tensor,
    scale: float,
    plan: Steps,
    tile: int | None,
) -> Tensor:
    """Attention of one token a share over its tokens, itself included, in the absorbed form.

    Args:
        q: [B, H, nope + rope].
        pages: [pages, layers, 64, rank + rope], the pool, same dtype.
        layer: position among the pool's layers.
        kv_b: [H, nope + V, rank], same dtype.
        scale: of the scores.
        plan: where the rows belong.
        tile: rows of one product while queries are absorbed; None for all at once.

    Returns:
        [B, H, V], same dtype.
    """
    return reference.attend_steps(q, pages, layer, kv_b, scale, plan, tile)
