"""KDA's short causal convolution with its rolling window of raw rows.

The pool keeps, per slot and layer, the last taps - 1 raw rows (before convolution), oldest first,
as [heads, taps - 1, 3, head_dim]; the 3 are q, k and v.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.conv import reference
from common.ops.plan import Chunks, Steps


def conv_chunks(raw: Tensor, weight: Tensor, pool: Tensor, layer: int, plan: Chunks) -> Tensor:
    """Convolve chunks, each share continuing from its slot's window, and roll the windows on.

    u_t = silu(sum_j weight[j] r_(t - taps + 1 + j)), accumulated in fp32, rounded once.

    Args:
        raw: [C, 64, 3, H, D], raw projections q, k, v; may be strided over rows.
        weight: fp32 [taps, 3, H, D]; the last tap multiplies the current token.
        pool: [slots, layers, H, taps - 1, 3, D], dtype of `raw`; changed in place.
        layer: position among the pool's layers.
        plan: where the chunks belong. Rows of padding change no window.

    Returns:
        [C, 64, 3, H, D], contiguous, dtype of `raw`; rows of padding are undefined but finite.
    """
    return reference.conv_chunks(raw, weight, pool, layer, plan)


def conv_steps(raw: Tensor, weight: Tensor, pool: Tensor, layer: int, plan: Steps) -> Tensor:
    """The same for one token a share.

    Args:
        raw: [B, 3, H, D]; may be strided over rows.
        weight: fp32 [taps, 3, H, D]; the last tap multiplies the current token.
        pool: [slots, layers, H, taps - 1, 3, D]; changed in place.
        layer: position among the pool's layers.
        plan: where the rows belong.

    Returns:
        [B, 3, H, D], contiguous, dtype of `raw`.
    """
    return reference.conv_steps(raw, weight, pool, layer, plan)
