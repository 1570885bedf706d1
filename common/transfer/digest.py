"""Digests of what travels: a slot's state, a request's pages, embedding rows.

Works on views of tensors, as a receiver sees them after the READ. Shards of a layer are digested
with the head they start at, and their signatures add up. The arithmetic is `common.ops.digest`;
names and logical indices: docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.ops.digest import MASK, Signature, digest_pages, digest_words, signature


def digest_slot(
    state: Tensor, conv: Tensor, layers: Sequence[int], *, first_head: int = 0, prefix: str = ""
) -> Signature:
    """Digest one slot.

    Args:
        state: [L, H, V, K] fp32, H heads starting at `first_head` of the unsharded layer.
        conv: [L, H, taps - 1, 3, head_dim].
        layers: the model's layer numbers, L of them.
        first_head: where this shard starts.
        prefix: "canary_" for the state before the last token.

    Returns:
        Names "<prefix>state:<layer>" and "<prefix>conv:<layer>".
    """
    signed = Signature()
    for kind, values in (("state", state), ("conv", conv)):
        head_words = values[0, 0].numel() * values.element_size() // 4
        sums, finite = digest_words(values, first_head * head_words)
        signed = signed | signature(f"{prefix}{kind}", layers, sums, finite)
    return signed


def digest_latents(
    pages: Tensor, layers: Sequence[int], num_tokens: int, *, first_page: int = 0
) -> Signature:
    """Digest a request's latents up to its last token.

    Args:
        pages: [P, L, page_tokens, width], the request's pages in order from `first_page` on.
        layers: the model's layer numbers, L of them.
        num_tokens: tokens of these pages that count, at most P * page_tokens.
        first_page: position of pages[0] in the request.

    Returns:
        Names "latent:<layer>".
    """
    page_tokens = pages.shape[2]
    page_words = pages[0, 0].numel() * pages.element_size() // 4
    full, rest = divmod(num_tokens, page_tokens)
    sums = torch.zeros(len(layers), dtype=torch.int64, device=pages.device)
    finite = torch.ones(len(layers), dtype=torch.bool, device=pages.device)
    for part, first in ((pages[:full], 0), (pages[full : full + 1, :, :rest], full)):
        if part.numel():
            part_sums, part_finite = digest_pages(part, (first_page + first) * page_words)
            sums, finite = sums + part_sums.sum(0), finite & part_finite.all(0)
    return signature("latent", layers, sums, finite)


def digest_embeds(rows: Tensor) -> tuple[int, bool]:
    """Digest one image's rows, [tokens, hidden]: the digest, and whether all are finite."""
    sums, finite = digest_words(rows[None])
    return int(sums.item()) & MASK, bool(finite.item())
