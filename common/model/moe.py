"""The feed-forward half of a layer: dense, or routed experts in a latent beside a shared expert.

Formulas: docs/model.md. The choice and the experts' sum are `common.ops.moe`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.config.spec import CHUNK, TextSpec
from common.model.run import Run
from common.ops.act import Activation
from common.parallel.team import Compute
from common.weights.tree import MlpWeights, MoeWeights


def activation_of(spec: TextSpec) -> Activation:
    """The checkpoint's activation with its constants."""
    return Activation(kind=spec.activation, beta=spec.situ_beta, linear_beta=spec.situ_linear_beta)


def feed_forward(
    x: Tensor,
    w: MlpWeights | MoeWeights,
    spec: TextSpec,
    act: Activation,
    run: Run,
    layer: int = 0,
) -> Tensor:
    """x [rows, D] already normed -> [rows, D], this rank's where rows are spread.

    `layer` counts MoE layers.
    """
    if isinstance(w, MlpWeights):
        return run.reduce(_dense(run.gather(x), w, act, run))
    return _mixture(x, w, spec, act, run, layer)


def router_logits(x: Tensor, w: MoeWeights, run: Run) -> Tensor:
    """fp32 [rows, E]: inputs as they are, products and sums in fp32."""
    out: Tensor = run.ops.widened(x, w.router, run.tile)
    return out


def idle(layer: int, w: MoeWeights, width: int, spec: TextSpec, act: Activation, run: Run) -> None:
    """Compute for other ranks' rows in a pass that has none here; `width` is the experts' input."""
    assert run.team is not None
    none = w.router.new_zeros(0, spec.moe.top_k)
    ids = none.to(torch.int64)
    z = torch.zeros(0, width, dtype=run.memory.latent.dtype, device=none.device)
    arrived = run.team.begin(layer, z, ids, ids[:, 0].bool())
    run.team.finish(arrived(), none, _own(w, act, run))


def _dense(x: Tensor, w: MlpWeights, act: Activation, run: Run) -> Tensor:
    return run.linear(run.ops.activate(run.linear(x, w.gate_up), act), w.down)


def _mixture(
    x: Tensor, w: MoeWeights, spec: TextSpec, act: Activation, run: Run, layer: int
) -> Tensor:
    moe = spec.moe
    ids, weights = run.ops.route(
        router_logits(x, w, run),
        w.bias,
        top_k=moe.top_k,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        renormalize=moe.renormalize,
        scaling=moe.scaling,
    )
    z = x if w.latent_down is None else run.linear(x, w.latent_down)
    out, shared = _both(x, z, ids, weights, w, act, run, layer)
    if run.team is not None and not run.team.mesh.spread:
        # Before the norm: the routed sum is whole only now. One reduction serves both sums.
        both = out if shared is None else torch.cat([out, shared], -1)
        out, shared = run.reduce(both).tensor_split((z.shape[-1],), -1)
        shared = None if w.shared is None else shared
    if w.latent_norm is not None:
        # After the weighted sum: the norm is not linear.
        out = run.ops.rms_norm(out, w.latent_norm, spec.eps)
    if w.latent_up is not None:
        out = run.linear(out, w.latent_up)
    return out if shared is None else torch.add(out, shared)


def _both(
    x: Tensor,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: MoeWeights,
    act: Activation,
    run: Run,
    layer: int,
) -> tuple[Tensor, Tensor | None]:
    """The experts' weighted sum [rows, Z] and the shared expert's output; this rank's part of both.

    The shared expert computes while rows are on their way to the experts of other ranks.
    """
    team = run.team
    arrived = None
    if team is None:
        run.chosen.append(ids)
    else:
        keep = run.own(run.tokens())
        team.count(layer, ids, keep)
        if team.exchange is not None:
            arrived = team.begin(layer, z, ids, keep)
    shared = None if w.shared is None else _dense(x, w.shared, act, run)
    if team is not None and arrived is not None:
        return team.finish(arrived(), weights, _own(w, act, run)), shared
    out: Tensor = run.ops.experts(z, ids, weights, w.experts, act, run.tile)
    return out, shared


def _own(w: MoeWeights, act: Activation, run: Run) -> Compute:
    # One height for rows from anywhere: their bits must not depend on this rank's own pass.
    tile = None if run.tile is None else CHUNK

    def compute(rows: Tensor, local: Tensor) -> Tensor:
        ones = torch.ones(local.shape, device=rows.device)
        out: Tensor = run.ops.experts(rows, local, ones, w.experts, act, tile)
        return out

    return compute
