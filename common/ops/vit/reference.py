"""The vision tower's ops in torch; reads the tables on the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from common.ops.vit.layout import Layout


def rotate(qkv: Tensor, layout: Layout, cos: Tensor, sin: Tensor) -> None:
    """See `common.ops.vit.rotate`."""
    # [N, 2, D / 4] to pairs: (column, row) for the first frequency, then for the second, ...
    turn = [table[layout.places].transpose(1, 2).flatten(1).unsqueeze(1) for table in (cos, sin)]
    for part in (0, 1):
        a, b = qkv[:, part].float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * turn[0] - b * turn[1], a * turn[1] + b * turn[0]], -1)
        qkv[:, part] = turned.flatten(-2).to(qkv.dtype)


def attend(qkv: Tensor, layout: Layout) -> Tensor:
    """See `common.ops.vit.attend`."""
    out = qkv.new_zeros(len(qkv), qkv.shape[2] * qkv.shape[3])
    for begin, end in sorted({(b, e) for start, b, e in layout.tiles.tolist() if start >= 0}):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv[begin:end].unbind(1))
        attended = functional.scaled_dot_product_attention(q, k, v)
        out[begin:end] = attended[0].transpose(0, 1).flatten(1)
    return out
