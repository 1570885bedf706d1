"""The vision tower's own ops: 2-D rotation, and attention of every image within itself."""

from __future__ import annotations

from torch import Tensor

from common.ops.vit import reference
from common.ops.vit.layout import TILE, Layout

__all__ = ["TILE", "Layout", "attend", "rotate"]


def rotate(qkv: Tensor, layout: Layout, cos: Tensor, sin: Tensor) -> None:
    """Turn neighbouring pairs of queries and keys in place, in fp32: even pairs by the patch's
    column, odd ones by its row.

    Args:
        qkv: [N, 3, H, D], D a multiple of 4.
        layout: places of the rows.
        cos: fp32 [sides, D / 4], of a place along an axis.
        sin: the same.
    """
    reference.rotate(qkv, layout, cos, sin)


def attend(qkv: Tensor, layout: Layout) -> Tensor:
    """Attention of every row over the rows of its image, scale D^-0.5, softmax in fp32.

    Args:
        qkv: [N, 3, H, D].
        layout: tiles of the images.

    Returns:
        [N, H * D]; rows of no image mean nothing.
    """
    return reference.attend(qkv, layout)
