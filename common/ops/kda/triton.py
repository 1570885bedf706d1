"""The whole KDA mixer between its projections: a launch for steps, five for chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import BackendUnsupported
from common.ops.conv.triton import conv_chunks
from common.ops.kda import Mixer, triton_chunk, triton_step
from common.ops.norm.triton import gated_rms_norm
from common.ops.plan import Chunks, Steps

ROWS = 64


def mix(
    raw: Tensor, forget: Tensor, strength: Tensor, opening: Tensor, parts: Mixer, state: Tensor,
    conv: Tensor, layer: int, plan: Chunks | Steps,
) -> Tensor:  # fmt: skip
    """Convolution, gate, delta rule and gated norm of every row of a pass.

    Args:
        raw: raw projections [N, 3, H, D]; a row may be strided, as may those that follow.
        forget: forget-gate logits [N, H, D]. strength: beta's logits [N, H].
        opening: output-gate logits [N, H, D].
        parts: the layer's parameters; the gate must be bounded.
        state: the pool, fp32 [slots, layers, H, D (value), D (key)]; changed.
        conv: the pool, [slots, layers, H, 3, 3, D]; changed.
        layer: position among the pools' layers.
        plan: where the rows belong; a step's negative slot pads the batch.

    Returns:
        [N, H, D], dtype of `raw`; rows of padding are undefined but finite.

    Raises:
        BackendUnsupported: the gate has no lower bound.
    """
    if parts.lower_bound is None:
        raise BackendUnsupported("the Triton KDA knows the bounded gate only; use the reference")
    out = torch.empty(opening.shape, dtype=raw.dtype, device=raw.device)
    if not raw.shape[0]:
        return out
    if isinstance(plan, Steps):
        return triton_step.launch(
            raw, parts.conv, forget, parts.rate, parts.bias, parts.lower_bound, strength, opening,
            parts.norm, parts.eps, state[:, layer], conv[:, layer], plan.slots, out,
        )  # fmt: skip
    wide, forget, strength = (x.unflatten(0, (-1, ROWS)) for x in (raw, forget, strength))
    q, k, v = conv_chunks(wide, parts.conv, conv, layer, plan).unbind(2)
    triton_chunk.launch(
        q, k, v, forget, strength, parts.rate, parts.bias, parts.lower_bound, state[:, layer], plan,
        out.unflatten(0, (-1, ROWS)),
    )  # fmt: skip
    return gated_rms_norm(out, opening, parts.norm, parts.eps)
