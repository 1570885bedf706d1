"""What one decode step moves on one rank, by part, and how long that takes.

Floors are arithmetic over shapes. What a part reaches of its floor was measured on one H200 with
four layers of the release (`python -m benchmarks.step_parts`, docs/benchmarks.md) and is applied to
any number of layers and ranks: that is an assumption, and so are the two latencies of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config.geometry import expert_bytes, item_bytes
from common.config.spec import ModelSpec

REACHED = {  # share of a part's floor, batch 32 at 8,192 tokens
    "KDA products": 0.88,
    "KDA step": 0.90,
    "attention products": 0.87,
    "attention": 0.52,
    "residual mixing": 0.85,
    "router": 0.85,
    "latent products": 0.72,
    "routed experts": 0.80,
    "shared expert": 0.86,
    "dense network": 0.94,
    "head": 0.97,
}
LEAST_S = {  # measured: of a layer, however few its rows are
    "residual mixing": 9e-6,
    "router": 34e-6,
}
SMALL_S = 25e-6  # measured: launches of a layer that no part has, and gaps between kernels
REDUCE_S = 12e-6  # assumed: one reduction over the tensor ranks of a node, latency alone
EXCHANGE_S = 40e-6  # assumed: dispatch and combine of one layer, latency alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a step computes, and how its replica is cut."""

    lane: int  # requests of one lane, a row each
    context: int  # tokens of each
    tensor: int = 1
    data: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one GPU."""

    copy: float  # bytes/s read plus written
    flops: float  # bf16
    network: float  # bytes/s out of its node


def floors(spec: ModelSpec, dtype: str, rows: Rows, rates: Rates) -> dict[str, float]:
    """Seconds of every part on one rank: bytes at the copy rate, of attention also the flops."""
    text, size, t = spec.text, item_bytes(dtype), rows.tensor
    h, kda, mla, moe = text.hidden, text.kda, text.mla, text.moe
    latent, mixing = moe.latent or h, len(text.moe_layers)
    queries, wide = mla.num_heads * (mla.nope_dim + mla.rope_dim), mla.num_heads * mla.v_dim
    used = moe.num_experts * touched(spec, rows.lane * rows.data) / rows.expert
    sources = 1 if text.residual_block is None else 3 + text.num_layers / text.residual_block / 2
    bytes_ = {
        "KDA products": len(text.kda_layers) * size * (
            h * (5 * kda.inner + kda.num_heads) / t + kda.head_dim * (h + kda.inner / t)
        ),
        "KDA step": len(text.kda_layers) * rows.lane * kda.num_heads / t * (
            8 * kda.head_dim**2 + 6 * (kda.conv_taps - 1) * size * kda.head_dim
        ),
        "attention products": len(text.mla_layers) * size * (
            h * ((mla.q_lora_rank or 0) + mla.latent_width + 2 * wide / t)
            + queries / t * (mla.q_lora_rank or h)
        ),
        "attention": len(text.mla_layers) * size * (
            rows.lane * rows.context * mla.latent_width
            + mla.num_heads / t * (mla.nope_dim + mla.v_dim) * mla.kv_lora_rank
        ),
        "residual mixing": text.num_layers * 2 * sources * rows.lane * h * size,
        "router": mixing * 4 * moe.num_experts * h,
        "latent products": 0 if moe.latent is None else mixing * size * 2 * latent * h,
        "routed experts": mixing * used * expert_bytes(spec, dtype),
        "shared expert": mixing * size * 3 * h * moe.num_shared * moe.width / t,
        "dense network": (text.num_layers - mixing) * size * 3 * h * text.dense_width / t,
        "head": (size * text.vocab * h + 4 * rows.lane * text.vocab) / t,
    }  # fmt: skip
    found = {part: moved / rates.copy for part, moved in bytes_.items()}
    values = mla.num_heads / t * (2 * mla.kv_lora_rank + mla.rope_dim)
    flops = len(text.mla_layers) * 2.0 * rows.lane * rows.context * values
    return found | {"attention": max(found["attention"], flops / rates.flops)}


def projected(spec: ModelSpec, dtype: str, rows: Rows, rates: Rates) -> dict[str, float]:
    """Seconds of every part of a whole step on one rank, as far as it can be told beforehand."""
    text = spec.text
    found = {part: s / REACHED[part] for part, s in floors(spec, dtype, rows, rates).items()}
    layers = {"residual mixing": text.num_layers, "router": len(text.moe_layers)}
    found |= {part: max(found[part], layers[part] * least) for part, least in LEAST_S.items()}
    found["small launches and gaps"] = text.num_layers * SMALL_S
    if rows.tensor > 1:
        found["reductions"] = 2 * text.num_layers * REDUCE_S
    if rows.expert > 1:
        sent = exchanged(spec, rows)
        found["exchange of experts"] = len(text.moe_layers) * (EXCHANGE_S + sent / rates.network)
    return found


def touched(spec: ModelSpec, rows: int) -> float:
    """Share of the experts that some row of a step chose, choices being even."""
    moe = spec.text.moe
    return float(1 - (1 - moe.top_k / moe.num_experts) ** rows)


def exchanged(spec: ModelSpec, rows: Rows) -> int:
    """Bytes one rank sends in one layer: its rows to their experts, and outputs back."""
    moe = spec.text.moe
    width = (moe.latent or spec.text.hidden) * 2
    own = -(-rows.lane // rows.tensor)  # the lane's rows are divided over its ranks
    return 2 * own * moe.top_k * width * (rows.expert - 1) // rows.expert
