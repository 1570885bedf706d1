"""ModelSpec: everything known of a checkpoint without reading a tensor, as frozen data.

Knows the model's shapes; how a `config.json` spells them is `common.config.checkpoint`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64  # tokens of one chunk of the KDA grid, and of one page


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaSpec:
    """The linear-attention mixer: heads of `head_dim` keys and values each."""

    num_heads: int
    head_dim: int
    conv_taps: int  # kernel size of the short convolution; conv_taps - 1 raw rows are kept
    gate_lower_bound: float | None  # None: the softplus gate
    full_rank_gate: bool

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """The latent-attention mixer without rotation."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    output_gate: bool

    @property
    def latent_width(self) -> int:
        """Values cached for one token in one layer: the normed latent, then the raw shared key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The routed experts."""

    num_experts: int
    top_k: int
    num_shared: int
    width: int
    latent: int | None  # None: experts work at the hidden size (Kimi-Linear)
    latent_norm: bool
    renormalize: bool
    scaling: float
    num_groups: int
    top_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """The text model."""

    hidden: int
    num_layers: int
    vocab: int
    kda: KdaSpec
    mla: MlaSpec
    moe: MoeSpec
    kda_layers: tuple[int, ...]  # 0-based; the config counts from 1
    mla_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    dense_width: int
    activation: str  # "situ" or "silu"
    situ_beta: float
    situ_linear_beta: float | None
    residual_block: int | None  # None: the ordinary residual stream
    eps: float
    max_position: int
    dtype: str
    listed_layers: int = (
        0  # layers the config's lists name; above num_layers where a tail was cut off
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The vision tower, its projector and its preprocessing limits."""

    patch: int
    merge: int
    grid_height: int
    grid_width: int
    hidden: int
    num_layers: int
    num_heads: int
    qkv_width: int
    mlp_width: int
    text_hidden: int
    projector_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything known of a checkpoint without reading a tensor."""

    text: TextSpec
    vision: VisionSpec | None
    prefix: str  # of the text tensors' names: "language_model." or ""
    quantization: str | None  # "mxfp4", "fp8" or None
    bos: int
    eos: int  # the id that ends a message
    pad: int
    media_pad: int | None
