"""The feed-forward half of a layer: dense, or routed experts in a latent beside a shared expert.

Formulas: docs/model.md. The choice and the experts' sum are `common.ops.moe`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.config.spec import TextSpec
from common.model.run import Run
from common.ops.act import Activation
from common.weights.tree import MlpWeights, MoeWeights


def activation_of(spec: TextSpec) -> Activation:
    """The checkpoint's activation with its constants."""
    return Activation(kind=spec.activation, beta=spec.situ_beta, linear_beta=spec.situ_linear_beta)


def feed_forward(
    x: Tensor, w: MlpWeights | MoeWeights, spec: TextSpec, act: Activation, run: Run
) -> Tensor:
    """x [rows, D] already normed -> [rows, D]."""
    if isinstance(w, MlpWeights):
        return _dense(x, w, act, run)
    return _mixture(x, w, spec, act, run)


def router_logits(x: Tensor, w: MoeWeights, run: Run) -> Tensor:
    """fp32 [rows, E]: inputs as they are, products and sums in fp32."""
    return run.linear(x.float(), w.router)


def _dense(x: Tensor, w: MlpWeights, act: Activation, run: Run) -> Tensor:
    return run.linear(run.ops.activate(run.linear(x, w.gate_up), act), w.down)


def _mixture(x: Tensor, w: MoeWeights, spec: TextSpec, act: Activation, run: Run) -> Tensor:
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
    out: Tensor = run.ops.experts(z, ids, weights, w.experts, act, run.tile)
    if w.latent_norm is not None:
        # After the weighted sum: the norm is not linear.
        out = run.ops.rms_norm(out, w.latent_norm, spec.eps)
    if w.latent_up is not None:
        out = run.linear(out, w.latent_up)
    return out if w.shared is None else torch.add(out, _dense(x, w.shared, act, run))
