"""The latent-attention mixer: queries, the cached latent, attention over pages, output gate.

Formulas: docs/model.md. No rotation anywhere: the "rope" part of a key is a plain shared key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.config.spec import CHUNK, MlaSpec
from common.model.run import Run
from common.ops.plan import Steps
from common.weights.tree import MlaWeights


def mix(x: Tensor, w: MlaWeights, spec: MlaSpec, eps: float, layer: int, run: Run) -> Tensor:
    """One mixer; x [rows, D] already normed -> [rows, D]. `layer` counts MLA layers."""
    query_width = len(w.inputs) - spec.latent_width
    query_width -= spec.num_heads * spec.v_dim if spec.output_gate else 0
    wide = run.linear(x, w.inputs)
    q, latent, gate = wide.tensor_split((query_width, query_width + spec.latent_width), -1)
    if w.q_b is not None and w.q_norm is not None:
        q = run.linear(run.ops.rms_norm(q, w.q_norm, eps), w.q_b)
    q = q.unflatten(-1, (spec.num_heads, -1))
    # The cache holds the normed latent and the raw shared key.
    normed = run.ops.rms_norm(latent[:, : spec.kv_lora_rank], w.kv_norm, eps)
    entry = torch.cat([normed, latent[:, spec.kv_lora_rank :]], -1)
    out = _attend(q, entry, w, spec, layer, run).flatten(1)
    if spec.output_gate:
        out = out * torch.sigmoid(gate)
    return run.reduce(run.linear(out, w.out))


def _attend(q: Tensor, entry: Tensor, w: MlaWeights, spec: MlaSpec, layer: int, run: Run) -> Tensor:
    """q [rows, H, nope + rope], entry [rows, latent_width] -> [rows, H, V]."""
    pages, ops, plan = run.memory.latent, run.ops, run.plan
    if isinstance(plan, Steps):
        ops.write_steps(entry[: run.real], pages, layer, plan)
        out = ops.mla_steps(q[: run.real], pages, layer, w.kv_b, spec.scale, plan, run.tile)
        return run.padded(out)
    ops.write_chunks(entry.unflatten(0, (-1, CHUNK)), pages, layer, plan)
    q = q.unflatten(0, (-1, CHUNK))
    return ops.mla_chunks(q, pages, layer, w.kv_b, spec.scale, plan, run.tile).flatten(0, 1)
