"""Write rows into pages."""

from __future__ import annotations

from torch import Tensor

from common.ops.paging import reference
from common.ops.plan import Chunks, Steps


def write_chunks(latent: Tensor, pages: Tensor, layer: int, plan: Chunks) -> None:
    """Store the latents of a pass over chunks; rows of padding are not written.

    Args:
        latent: [C, 64, W].
        pages: [pages, layers, 64, W], the pool, same dtype; changed in place.
        layer: position among the pool's layers.
        plan: where the chunks belong.
    """
    reference.write_chunks(latent, pages, layer, plan)


def write_steps(latent: Tensor, pages: Tensor, layer: int, plan: Steps) -> None:
    """Store one latent a share at its next position.

    Args:
        latent: [B, W].
        pages: [pages, layers, 64, W], the pool, same dtype; changed in place.
        layer: position among the pool's layers.
        plan: where the rows belong.
    """
    reference.write_steps(latent, pages, layer, plan)
