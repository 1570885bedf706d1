"""Kimi delta attention: the gate, the chunked form for prompts and the step form for decoding.

Per head, with key rows k, value rows v and a state S (stored value-major, [V, K]):

    S <- S diag(exp(g_t));  e = v_t - S k_t;  S <- S + (beta_t e) k_t^T;  o_t = S q_t

q and k are divided by sqrt(sum of squares + 1e-6), q then multiplied by K^-0.5. Formulas of the
chunked form: docs/model.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.ops.kda import reference
from common.ops.plan import Chunks, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """What one layer's convolution, gate and output norm need besides the pool."""

    conv: Tensor  # fp32 [taps, 3, H, D]
    rate: Tensor  # fp32 [H], exp(A_log)
    bias: Tensor  # fp32 [H, D]
    lower_bound: float | None  # None: the softplus gate
    norm: Tensor  # fp32 [D]
    eps: float  # of the norm


def gate(logits: Tensor, rate: Tensor, bias: Tensor, lower_bound: float | None) -> Tensor:
    """The log decay of every head and key channel.

    With z = logits + bias: `lower_bound * sigmoid(rate * z)`, or, without a bound,
    `-rate * softplus(z)`; fp32 throughout.

    Args:
        logits: [N, H, K], any float dtype; H * K a multiple of 32.
        rate: fp32 [H], exp(A_log).
        bias: fp32 [H, K].
        lower_bound: in [-5, 0), or None for the softplus gate.

    Returns:
        fp32 [N, H, K], at most 0.
    """
    return reference.gate(logits, rate, bias, lower_bound)


def chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    layer: int,
    plan: Chunks,
) -> Tensor:
    """Absorb whole chunks into the states of their slots, in order, and read every row.

    A share's result depends on its own chunks and slot alone, and not on how its chunks were
    divided over passes. Rows of padding change no state.

    Args:
        q: [C, 64, H, K] after convolution, not normalised; may be strided.
        k: as q.
        v: [C, 64, H, V].
        g: fp32 [C, 64, H, K], log decay, at most 0.
        beta: fp32 [C, 64, H], in (0, 1).
        state: fp32 [slots, layers, H, V, K], the pool; changed in place.
        layer: position among the pool's layers.
        plan: where the chunks belong.

    Returns:
        fp32 [C, 64, H, V]; rows of padding are undefined but finite.
    """
    return reference.chunks(q, k, v, g, beta, state, layer, plan)


def steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    layer: int,
    plan: Steps,
) -> Tensor:
    """Absorb one token a share and read it.

    Args:
        q: [B, H, K] after convolution, not normalised; may be strided.
        k: as q.
        v: [B, H, V].
        g: fp32 [B, H, K], log decay, at most 0.
        beta: fp32 [B, H], in (0, 1).
        state: fp32 [slots, layers, H, V, K], the pool; changed in place.
        layer: position among the pool's layers.
        plan: where the rows belong; slots are distinct.

    Returns:
        fp32 [B, H, V].
    """
    return reference.steps(q, k, v, g, beta, state, layer, plan)
