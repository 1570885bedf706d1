"""The weights as the model uses them: fused where one input feeds several products.

Plain frozen data. Which checkpoint tensor lands where is `common.weights.build`'s business.
Shapes use H heads, K = V = head_dim, D = hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.ops.moe.stack import ExpertStack


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaWeights:
    """One KDA mixer. `inputs` stacks q, k, v, output gate (or its low-rank half), f_a and b."""

    inputs: Tensor  # [3 H K + gate + K + H, D]; gate is H K, or K where it is low-rank
    f_b: Tensor  # [H K, K]
    g_b: Tensor | None  # [H K, K] of the low-rank gate
    conv: Tensor  # fp32 [taps, 3, H, K]
    rate: Tensor  # fp32 [H], exp(A_log)
    dt_bias: Tensor  # fp32 [H, K]
    o_norm: Tensor  # fp32 [K]
    out: Tensor  # [D, H K]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """One MLA mixer. `inputs` stacks the query's (latent) projection, the latent's and the gate."""

    inputs: Tensor  # [q_lora_rank or H (nope + rope), + rank + rope, + H V where gated, D]
    q_norm: Tensor | None  # [q_lora_rank]
    q_b: Tensor | None  # [H (nope + rope), q_lora_rank]
    kv_norm: Tensor  # [rank]
    kv_b: Tensor  # [H, nope + V, rank]
    out: Tensor  # [D, H V]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """A gated feed-forward network of width F."""

    gate_up: Tensor  # [2F, D], gate above up
    down: Tensor  # [D, F]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """Router, routed experts behind their latent projections, and the shared expert."""

    router: Tensor  # fp32 [E, D]
    bias: Tensor  # fp32 [E]
    latent_down: Tensor | None  # [Z, D]
    latent_norm: Tensor | None  # [Z]
    latent_up: Tensor | None  # [D, Z]
    experts: ExpertStack
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. The scores are norm weight times projection of its two residual reads."""

    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    mixer_score: Tensor | None  # fp32 [D]
    ffn_score: Tensor | None  # fp32 [D]
    mixer: KdaWeights | MlaWeights
    ffn: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWeights:
    """The text model."""

    embed: Tensor  # [vocab, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    out_score: Tensor | None  # fp32 [D]
    head: Tensor  # [vocab, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayerWeights:
    """One block of the vision tower, D its width."""

    norm0: Tensor  # [D]
    norm1: Tensor  # [D]
    wqkv: Tensor  # [3 qkv_width, D]
    wo: Tensor  # [D, qkv_width]
    fc0: Tensor  # [mlp_width, D]
    fc1: Tensor  # [D, mlp_width]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWeights:
    """Tower and projector."""

    patch: Tensor  # [D, 3 patch patch]
    pos: Tensor  # [grid_height, grid_width, D]
    layers: tuple[VisionLayerWeights, ...]
    norm: Tensor  # [D]
    project0: Tensor  # [4 D, 4 D]
    project2: Tensor  # [text_hidden, 4 D]
    post_norm: Tensor  # [text_hidden]
