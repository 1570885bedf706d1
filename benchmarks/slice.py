"""A slice of the release to time and to test: layers of true or small width with random weights."""

from __future__ import annotations

import dataclasses

import torch

from common.config.spec import CHUNK, KdaSpec, MlaSpec, MoeSpec, TextSpec
from common.model.batch import Memory
from common.ops.moe.stack import ExpertStack
from common.weights.tree import (
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
    TextWeights,
)

BF16 = torch.bfloat16
SPEC = TextSpec(
    hidden=7168, num_layers=4, vocab=163840,
    kda=KdaSpec(
        num_heads=96, head_dim=128, conv_taps=4, gate_lower_bound=-5.0, full_rank_gate=True
    ),
    mla=MlaSpec(
        num_heads=96, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
        output_gate=True,
    ),
    moe=MoeSpec(
        num_experts=896, top_k=16, num_shared=2, width=3072, latent=3584, latent_norm=True,
        renormalize=True, scaling=1.0, num_groups=1, top_groups=1,
    ),
    kda_layers=(0, 1, 2), mla_layers=(3,), moe_layers=(1, 2, 3), dense_width=33792,
    activation="situ", situ_beta=4.0, situ_linear_beta=25.0, residual_block=12, eps=1e-5,
    max_position=1 << 20, dtype="bfloat16",
)  # fmt: skip
SMALL = dataclasses.replace(
    SPEC, hidden=512, vocab=1000, dense_width=768, residual_block=2,
    kda=dataclasses.replace(SPEC.kda, num_heads=12),
    mla=dataclasses.replace(SPEC.mla, num_heads=12, q_lora_rank=256),
    moe=dataclasses.replace(SPEC.moe, num_experts=56, width=128, latent=256),
)  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 0.02) -> torch.Tensor:
    """Random weights on the device."""
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def packed(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    """Random bytes on the device."""
    return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(low, high)


def weights(spec: TextSpec = SPEC) -> TextWeights:
    """The slice's weights; each product keeps its inputs' size."""
    one = torch.ones(spec.hidden, device="cuda", dtype=BF16)
    dense = mlp(spec.hidden, spec.dense_width)
    layers = [
        LayerWeights(
            input_norm=one,
            post_norm=one,
            mixer_score=normal(spec.hidden, dtype=torch.float32),
            ffn_score=normal(spec.hidden, dtype=torch.float32),
            mixer=mla(spec) if layer in spec.mla_layers else kda(spec),
            ffn=moe(spec) if layer in spec.moe_layers else dense,
        )
        for layer in range(spec.num_layers)
    ]
    return TextWeights(
        embed=normal(spec.vocab, spec.hidden), layers=tuple(layers), norm=one,
        out_score=normal(spec.hidden, dtype=torch.float32), head=normal(spec.vocab, spec.hidden),
    )  # fmt: skip


def mlp(hidden: int, width: int) -> MlpWeights:
    """A dense network."""
    return MlpWeights(gate_up=normal(2 * width, hidden), down=normal(hidden, width))


def kda(spec: TextSpec) -> KdaWeights:
    """A KDA mixer."""
    heads, dim, inner = spec.kda.num_heads, spec.kda.head_dim, spec.kda.inner
    return KdaWeights(
        inputs=normal(4 * inner + dim + heads, spec.hidden), f_b=normal(inner, dim), g_b=None,
        conv=normal(4, 3, heads, dim, dtype=torch.float32, scale=0.5),
        rate=torch.ones(heads, device="cuda"), dt_bias=normal(heads, dim, dtype=torch.float32),
        o_norm=torch.ones(dim, device="cuda"), out=normal(spec.hidden, inner),
    )  # fmt: skip


def mla(spec: TextSpec) -> MlaWeights:
    """An attention mixer."""
    m = spec.mla
    assert m.q_lora_rank is not None
    wide = m.num_heads * m.v_dim
    return MlaWeights(
        inputs=normal(m.q_lora_rank + m.latent_width + wide, spec.hidden),
        q_norm=torch.ones(m.q_lora_rank, device="cuda", dtype=BF16),
        q_b=normal(m.num_heads * (m.nope_dim + m.rope_dim), m.q_lora_rank),
        kv_norm=torch.ones(m.kv_lora_rank, device="cuda", dtype=BF16),
        kv_b=normal(m.num_heads, m.nope_dim + m.v_dim, m.kv_lora_rank),
        out=normal(spec.hidden, wide),
    )  # fmt: skip


def moe(spec: TextSpec) -> MoeWeights:
    """Routed experts, packed, and the shared one."""
    m = spec.moe
    assert m.latent is not None
    count, width, latent = m.num_experts, m.width, m.latent
    stack = ExpertStack(
        w13=packed(count, 2 * width, latent // 2), w2=packed(count, latent, width // 2),
        w13_scale=packed(count, 2 * width, latent // 32, low=116, high=121),
        w2_scale=packed(count, latent, width // 32, low=116, high=121),
    )  # fmt: skip
    return MoeWeights(
        router=normal(count, spec.hidden, dtype=torch.float32),
        bias=normal(count, dtype=torch.float32), latent_down=normal(latent, spec.hidden),
        latent_norm=torch.ones(latent, device="cuda", dtype=BF16),
        latent_up=normal(spec.hidden, latent), experts=stack,
        shared=mlp(spec.hidden, m.num_shared * width),
    )  # fmt: skip


def memory(spec: TextSpec, slots: int, pages: int, *, full: bool = True) -> Memory:
    """Pools; `full` ones hold latents."""
    kda, layers = spec.kda, (len(spec.kda_layers), len(spec.mla_layers))
    latent = (pages, layers[1], CHUNK, spec.mla.latent_width)
    return Memory(
        state=torch.zeros(
            slots, layers[0], kda.num_heads, kda.head_dim, kda.head_dim, device="cuda"
        ),
        conv=torch.zeros(
            slots, layers[0], kda.num_heads, 3, 3, kda.head_dim, device="cuda", dtype=BF16
        ),
        latent=normal(*latent, scale=1.0)
        if full
        else torch.zeros(latent, device="cuda", dtype=BF16),
    )
