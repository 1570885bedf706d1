"""The linear-attention mixer: projections, short convolution, delta rule, gated norm.

Formulas: docs/model.md. The delta rule itself is `common.ops.kda`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from common.config.spec import CHUNK, KdaSpec
from common.model.run import Run
from common.ops.kda import Mixer
from common.ops.plan import Chunks, Steps
from common.weights.tree import KdaWeights

NORM_EPS = 1e-5  # of the output norm; the release does not read it from its configuration
LANES = 32  # elementwise widths are multiples of the widest vector loop


def mix(x: Tensor, w: KdaWeights, spec: KdaSpec, layer: int, run: Run) -> Tensor:
    """One mixer; x [rows, D] already normed -> [rows, D]. `layer` counts KDA layers."""
    heads, dim, inner = spec.num_heads, spec.head_dim, spec.inner
    widths = [3 * inner, inner if spec.full_rank_gate else dim, dim, heads]
    raw, gate, forget, strength = run.linear(x, w.inputs).split(widths, -1)
    if w.g_b is not None:
        gate = run.linear(gate, w.g_b)
    logits = run.linear(forget, w.f_b).view(-1, heads, dim)
    triple = raw.unflatten(-1, (3, heads, dim))
    opening = gate.unflatten(-1, (heads, dim))
    if run.ops.kda_mix is not None:
        parts = Mixer(
            conv=w.conv,
            rate=w.rate,
            bias=w.dt_bias,
            lower_bound=spec.gate_lower_bound,
            norm=w.o_norm,
            eps=NORM_EPS,
        )
        rows = (x[: run.real] for x in (triple, logits, strength, opening))
        mixed = run.padded(
            run.ops.kda_mix(*rows, parts, run.memory.state, run.memory.conv, layer, run.plan)
        )
        run.watch(mixed)
        return run.reduce(run.linear(mixed.flatten(1), w.out))
    decay = run.ops.kda_gate(logits, w.rate, w.dt_bias, spec.gate_lower_bound)
    # No vector tails: a sigmoid's last bit would depend on the number of rows.
    beta = torch.sigmoid(functional.pad(strength.float(), (0, -heads % LANES)))[:, :heads]
    out = _absorb(triple, decay, beta, w, layer, run)
    normed = run.ops.gated_rms_norm(out, opening, w.o_norm, NORM_EPS)
    run.watch(normed)
    return run.reduce(run.linear(normed.flatten(1), w.out))


def _absorb(
    raw: Tensor, decay: Tensor, beta: Tensor, w: KdaWeights, layer: int, run: Run
) -> Tensor:
    """raw [rows, 3, H, K], decay [rows, H, K], beta [rows, H] -> fp32 [rows, H, V]."""
    memory, ops, plan = run.memory, run.ops, run.plan
    if isinstance(plan, Steps):
        raw, decay, beta = raw[: run.real], decay[: run.real], beta[: run.real]
        q, k, v = ops.conv_steps(raw, w.conv, memory.conv, layer, plan).unbind(1)
        return run.padded(ops.kda_steps(q, k, v, decay, beta, memory.state, layer, plan))
    assert isinstance(plan, Chunks)
    raw, decay, beta = (x.unflatten(0, (-1, CHUNK)) for x in (raw, decay, beta))
    q, k, v = ops.conv_chunks(raw, w.conv, memory.conv, layer, plan).unbind(2)
    return ops.kda_chunks(q, k, v, decay, beta, memory.state, layer, plan).flatten(0, 1)
