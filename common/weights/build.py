"""Allocate the weights of a model and say which checkpoint name goes where.

The one place that knows the release's tensor names. Names: docs/model.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.config.spec import KdaSpec, MlaSpec, ModelSpec, MoeSpec, TextSpec, VisionSpec
from common.ops.moe.stack import ExpertStack
from common.weights.shelf import Shelf, multiply
from common.weights.tree import (
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
    TextWeights,
    VisionLayerWeights,
    VisionWeights,
)

FP32 = torch.float32


def build_text(spec: ModelSpec, shelf: Shelf, *, packed: bool = False) -> TextWeights:
    """Allocate the text model on the shelf; `packed` keeps MXFP4 experts as bytes."""
    text, prefix = spec.text, spec.prefix
    root = f"{prefix}model"
    residual = text.residual_block is not None
    return TextWeights(
        embed=shelf.new(f"{root}.embed_tokens.weight", text.vocab, text.hidden),
        layers=tuple(
            _layer(shelf, f"{root}.layers.{i}", text, i, packed) for i in range(text.num_layers)
        ),
        norm=shelf.new(f"{root}.norm.weight", text.hidden),
        out_score=_score(shelf, f"{root}.output_attn_res", text.hidden) if residual else None,
        head=shelf.new(f"{prefix}lm_head.weight", text.vocab, text.hidden),
    )


def _layer(shelf: Shelf, p: str, text: TextSpec, index: int, packed: bool) -> LayerWeights:
    hidden, residual = text.hidden, text.residual_block is not None
    mixer: KdaWeights | MlaWeights
    if index in text.kda_layers:
        mixer = _kda(shelf, f"{p}.self_attn", text.kda, hidden)
    else:
        mixer = _mla(shelf, f"{p}.self_attn", text.mla, hidden)
    ffn: MlpWeights | MoeWeights
    if index in text.moe_layers:
        ffn = _moe(shelf, f"{p}.block_sparse_moe", text.moe, hidden, packed)
    else:
        ffn = _mlp(shelf, f"{p}.mlp", hidden, text.dense_width)
    return LayerWeights(
        input_norm=shelf.new(f"{p}.input_layernorm.weight", hidden),
        post_norm=shelf.new(f"{p}.post_attention_layernorm.weight", hidden),
        mixer_score=_score(shelf, f"{p}.self_attention_res", hidden) if residual else None,
        ffn_score=_score(shelf, f"{p}.mlp_res", hidden) if residual else None,
        mixer=mixer,
        ffn=ffn,
    )


def _score(shelf: Shelf, p: str, hidden: int) -> Tensor:
    score = torch.ones(hidden, dtype=FP32, device=shelf.device)
    shelf.put(f"{p}_norm.weight", score, fill=multiply)
    return shelf.put(f"{p}_proj.weight", score, shapes=((1, hidden),), fill=multiply)


def _stacked(shelf: Shelf, parts: list[tuple[str, int]], width: int) -> Tensor:
    """One matrix of several products with the same input."""
    whole = shelf.empty(sum(rows for _, rows in parts), width)
    for (name, rows), part in zip(parts, whole.split([r for _, r in parts]), strict=True):
        assert len(part) == rows
        shelf.put(f"{name}.weight", part)
    return whole


def _kda(shelf: Shelf, p: str, kda: KdaSpec, hidden: int) -> KdaWeights:
    heads, dim, inner, taps = kda.num_heads, kda.head_dim, kda.inner, kda.conv_taps
    gate = (f"{p}.g_proj", inner) if kda.full_rank_gate else (f"{p}.g_a_proj", dim)
    parts = [*((f"{p}.{x}_proj", inner) for x in "qkv"), gate]
    parts += [(f"{p}.f_a_proj", dim), (f"{p}.b_proj", heads)]
    conv, rate = shelf.empty(taps, 3, heads, dim, dtype=FP32), shelf.empty(heads, dtype=FP32)

    def fill_conv(into: Tensor, source: Tensor) -> None:
        into.copy_(source.view(heads, dim, taps).permute(2, 0, 1))

    def fill_rate(into: Tensor, source: Tensor) -> None:
        # Stored longer than there are heads: one value a head, the rest is padding.
        into.copy_(source.flatten()[:heads].float().exp())

    for i, x in enumerate("qkv"):
        name = f"{p}.{x}_conv1d.weight"
        shelf.put(name, conv[:, i], shapes=((inner, 1, taps),), kind="float", fill=fill_conv)
    shapes = ((dim,), (heads,), (1, 1, heads, 1))[0 if heads <= dim else 1 :]
    shelf.put(f"{p}.A_log", rate, shapes=shapes, kind="float", fill=fill_rate)
    dt_bias = shelf.empty(heads, dim, dtype=FP32)
    shelf.put(f"{p}.dt_bias", dt_bias, shapes=((inner,),), kind="float")
    return KdaWeights(
        inputs=_stacked(shelf, parts, hidden),
        f_b=shelf.new(f"{p}.f_b_proj.weight", inner, dim),
        g_b=None if kda.full_rank_gate else shelf.new(f"{p}.g_b_proj.weight", inner, dim),
        conv=conv,
        rate=rate,
        dt_bias=dt_bias,
        o_norm=shelf.new(f"{p}.o_norm.weight", dim, dtype=FP32),
        out=shelf.new(f"{p}.o_proj.weight", hidden, inner),
    )


def _mla(shelf: Shelf, p: str, mla: MlaSpec, hidden: int) -> MlaWeights:
    heads, rank, q_rank = mla.num_heads, mla.kv_lora_rank, mla.q_lora_rank
    queries = heads * (mla.nope_dim + mla.rope_dim)
    parts = [(f"{p}.q_proj", queries) if q_rank is None else (f"{p}.q_a_proj", q_rank)]
    parts += [(f"{p}.kv_a_proj_with_mqa", mla.latent_width)]
    if mla.output_gate:
        parts += [(f"{p}.g_proj", heads * mla.v_dim)]
    each = mla.nope_dim + mla.v_dim
    kv_b = shelf.empty(heads, each, rank)
    shelf.put(f"{p}.kv_b_proj.weight", kv_b, shapes=((heads * each, rank),))
    norm = None if q_rank is None else shelf.new(f"{p}.q_a_layernorm.weight", q_rank)
    return MlaWeights(
        inputs=_stacked(shelf, parts, hidden),
        q_norm=norm,
        q_b=None if q_rank is None else shelf.new(f"{p}.q_b_proj.weight", queries, q_rank),
        kv_norm=shelf.new(f"{p}.kv_a_layernorm.weight", rank),
        kv_b=kv_b,
        out=shelf.new(f"{p}.o_proj.weight", hidden, heads * mla.v_dim),
    )


def _mlp(shelf: Shelf, p: str, hidden: int, width: int) -> MlpWeights:
    return MlpWeights(
        gate_up=_stacked(shelf, [(f"{p}.gate_proj", width), (f"{p}.up_proj", width)], hidden),
        down=shelf.new(f"{p}.down_proj.weight", hidden, width),
    )


def _moe(shelf: Shelf, p: str, moe: MoeSpec, hidden: int, packed: bool) -> MoeWeights:
    latent, count = moe.latent, moe.num_experts
    router, bias = shelf.empty(count, hidden, dtype=FP32), shelf.empty(count, dtype=FP32)
    shelf.put(f"{p}.gate.weight", router)
    shelf.put(f"{p}.gate.e_score_correction_bias", bias, kind="float")
    down = norm = up = None
    if latent is not None:
        down = shelf.new(f"{p}.routed_expert_down_proj.weight", latent, hidden)
        up = shelf.new(f"{p}.routed_expert_up_proj.weight", hidden, latent)
        if moe.latent_norm:
            norm = shelf.new(f"{p}.routed_expert_norm.weight", latent)
    return MoeWeights(
        router=router,
        bias=bias,
        latent_down=down,
        latent_norm=norm,
        latent_up=up,
        experts=(_packed if packed else _experts)(shelf, f"{p}.experts.*", moe, latent or hidden),
        shared=_mlp(shelf, f"{p}.shared_experts", hidden, moe.width * moe.num_shared)
        if moe.num_shared
        else None,
    )


def _experts(shelf: Shelf, p: str, moe: MoeSpec, width: int) -> ExpertStack:
    count, inner = moe.num_experts, moe.width
    w13, w2 = shelf.empty(count, 2 * inner, width), shelf.empty(count, width, inner)
    for name, dest in (("w1", w13[:, :inner]), ("w3", w13[:, inner:]), ("w2", w2)):
        shelf.put(f"{p}.{name}.weight", dest, experts=count)
    return ExpertStack(w13=w13, w2=w2)


def _packed(shelf: Shelf, p: str, moe: MoeSpec, width: int) -> ExpertStack:
    count, inner, u8 = moe.num_experts, moe.width, torch.uint8
    tensors = []
    for suffix, each in (("packed", 2), ("scale", 32)):
        w13 = shelf.empty(count, 2 * inner, width // each, dtype=u8)
        w2 = shelf.empty(count, width, inner // each, dtype=u8)
        for name, dest in (("w1", w13[:, :inner]), ("w3", w13[:, inner:]), ("w2", w2)):
            shelf.put(f"{p}.{name}.weight_{suffix}", dest, kind="u8", experts=count)
        tensors += [w13, w2]
    return ExpertStack(w13=tensors[0], w2=tensors[1], w13_scale=tensors[2], w2_scale=tensors[3])


def build_vision(spec: VisionSpec, shelf: Shelf) -> VisionWeights:
    """Allocate tower and projector on the shelf."""
    tower, projector = "vision_tower", "mm_projector"
    width, merged = spec.hidden, spec.hidden * spec.merge**2
    pixels = 3 * spec.patch**2
    patch = shelf.empty(width, pixels)
    name = f"{tower}.patch_embed.proj.weight"
    shelf.put(name, patch, shapes=((width, 3, spec.patch, spec.patch),))
    grid = (spec.grid_height, spec.grid_width)
    blocks = f"{tower}.encoder.blocks"
    return VisionWeights(
        patch=patch,
        pos=shelf.new(f"{tower}.patch_embed.pos_emb.weight", *grid, width),
        layers=tuple(_block(shelf, f"{blocks}.{i}", spec) for i in range(spec.num_layers)),
        norm=shelf.new(f"{tower}.encoder.final_layernorm.weight", width),
        project0=shelf.new(f"{projector}.proj.0.weight", merged, merged),
        project2=shelf.new(f"{projector}.proj.2.weight", spec.text_hidden, merged),
        post_norm=shelf.new(f"{projector}.post_norm.weight", spec.text_hidden),
    )


def _block(shelf: Shelf, p: str, spec: VisionSpec) -> VisionLayerWeights:
    width = spec.hidden
    return VisionLayerWeights(
        norm0=shelf.new(f"{p}.norm0.weight", width),
        norm1=shelf.new(f"{p}.norm1.weight", width),
        wqkv=shelf.new(f"{p}.wqkv.weight", 3 * spec.qkv_width, width),
        wo=shelf.new(f"{p}.wo.weight", width, spec.qkv_width),
        fc0=shelf.new(f"{p}.mlp.fc0.weight", spec.mlp_width, width),
        fc1=shelf.new(f"{p}.mlp.fc1.weight", width, spec.mlp_width),
    )
