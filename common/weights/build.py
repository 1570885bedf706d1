"""Allocate the weights of a model and say which checkpoint name goes where.

The one place that knows the release's tensor names. Names: docs/model.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.config.spec import KdaSpec, MlaSpec, ModelSpec, MoeSpec, TextSpec, VisionSpec
from common.ops.moe.stack import ExpertStack
from common.weights.shares import WHOLE, Cut, Piece, Shard
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


def build_text(
    spec: ModelSpec, shelf: Shelf, *, packed: bool = False, shard: Shard = WHOLE
) -> TextWeights:
    """Allocate what a rank holds of the text model; `packed` keeps MXFP4 experts as bytes."""
    text, prefix = spec.text, spec.prefix
    words = shard.vocabulary(text.vocab)
    root = f"{prefix}model"
    residual = text.residual_block is not None
    return TextWeights(
        embed=shelf.new(f"{root}.embed_tokens.weight", words.size, text.hidden, cut=words.cut(0)),
        layers=tuple(
            _layer(shelf, f"{root}.layers.{i}", text, i, packed, shard)
            for i in range(text.num_layers)
        ),
        norm=shelf.new(f"{root}.norm.weight", text.hidden),
        out_score=_score(shelf, f"{root}.output_attn_res", text.hidden) if residual else None,
        head=shelf.new(f"{prefix}lm_head.weight", words.size, text.hidden, cut=words.cut(0)),
    )


def _layer(
    shelf: Shelf, p: str, text: TextSpec, index: int, packed: bool, shard: Shard
) -> LayerWeights:
    hidden, residual = text.hidden, text.residual_block is not None
    mixer: KdaWeights | MlaWeights
    if index in text.kda_layers:
        mixer = _kda(shelf, f"{p}.self_attn", text.kda, hidden, shard)
    else:
        mixer = _mla(shelf, f"{p}.self_attn", text.mla, hidden, shard)
    ffn: MlpWeights | MoeWeights
    if index in text.moe_layers:
        ffn = _moe(shelf, f"{p}.block_sparse_moe", text.moe, hidden, packed, shard)
    else:
        ffn = _mlp(shelf, f"{p}.mlp", hidden, shard.wide(text.dense_width))
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


def _stacked(shelf: Shelf, parts: list[tuple[str, Piece]], width: int) -> Tensor:
    """One matrix of several products with the same input."""
    sizes = [piece.size for _, piece in parts]
    whole = shelf.empty(sum(sizes), width)
    for (name, piece), part in zip(parts, whole.split(sizes), strict=True):
        shelf.put(f"{name}.weight", part, cut=piece.cut(0))
    return whole


def _all(size: int) -> Piece:
    """What every rank reads whole."""
    return Piece(size, 0, size, size)


def _kda(shelf: Shelf, p: str, kda: KdaSpec, hidden: int, shard: Shard) -> KdaWeights:
    dim, taps = kda.head_dim, kda.conv_taps
    own, inner = shard.heads(kda.num_heads), shard.heads(kda.num_heads, dim)
    rows = inner.cut(0)
    gate = (f"{p}.g_proj", inner) if kda.full_rank_gate else (f"{p}.g_a_proj", _all(dim))
    parts = [*((f"{p}.{x}_proj", inner) for x in "qkv"), gate]
    parts += [(f"{p}.f_a_proj", _all(dim)), (f"{p}.b_proj", own)]
    dt_bias = shelf.empty(own.size, dim, dtype=FP32)
    shapes = ((inner.total,),)
    shelf.put(f"{p}.dt_bias", dt_bias, shapes=shapes, kind="float", cut=rows)
    g_b = f"{p}.g_b_proj.weight"
    return KdaWeights(
        inputs=_stacked(shelf, parts, hidden),
        f_b=shelf.new(f"{p}.f_b_proj.weight", inner.size, dim, cut=rows),
        g_b=None if kda.full_rank_gate else shelf.new(g_b, inner.size, dim, cut=rows),
        conv=_conv(shelf, p, own.size, dim, taps, inner),
        rate=_rate(shelf, p, own, dim),
        dt_bias=dt_bias,
        o_norm=shelf.new(f"{p}.o_norm.weight", dim, dtype=FP32),
        out=shelf.new(f"{p}.o_proj.weight", hidden, inner.size, cut=inner.cut(1)),
    )


def _conv(shelf: Shelf, p: str, heads: int, dim: int, taps: int, inner: Piece) -> Tensor:
    conv = shelf.empty(taps, 3, heads, dim, dtype=FP32)

    def fill(into: Tensor, source: Tensor) -> None:
        into.copy_(source.view(heads, dim, taps).permute(2, 0, 1))

    shapes, rows = ((inner.total, 1, taps),), inner.cut(0)
    for i, x in enumerate("qkv"):
        name = f"{p}.{x}_conv1d.weight"
        shelf.put(name, conv[:, i], shapes=shapes, kind="float", fill=fill, cut=rows)
    return conv


def _rate(shelf: Shelf, p: str, own: Piece, dim: int) -> Tensor:
    rate, heads = shelf.empty(own.size, dtype=FP32), own.total

    def fill(into: Tensor, source: Tensor) -> None:
        # Stored longer than there are heads: one value a head, the rest is padding. So it is read
        # whole and a rank takes its heads of it; an even cut of the file would be other heads.
        mine = source.flatten()[own.start : own.start + own.size]
        into.copy_(mine.float().exp())

    shapes = ((dim,), (heads,), (1, 1, heads, 1))[0 if heads <= dim else 1 :]
    return shelf.put(f"{p}.A_log", rate, shapes=shapes, kind="float", fill=fill)


def _mla(shelf: Shelf, p: str, mla: MlaSpec, hidden: int, shard: Shard) -> MlaWeights:
    heads, rank, q_rank = mla.num_heads, mla.kv_lora_rank, mla.q_lora_rank
    queries = shard.heads(heads, mla.nope_dim + mla.rope_dim)
    values = shard.heads(heads, mla.v_dim)
    first = (f"{p}.q_proj", queries) if q_rank is None else (f"{p}.q_a_proj", _all(q_rank))
    parts = [first, (f"{p}.kv_a_proj_with_mqa", _all(mla.latent_width))]
    if mla.output_gate:
        parts += [(f"{p}.g_proj", values)]
    both = shard.heads(heads, mla.nope_dim + mla.v_dim)
    kv_b = shelf.empty(shard.heads(heads).size, mla.nope_dim + mla.v_dim, rank)
    shelf.put(f"{p}.kv_b_proj.weight", kv_b, shapes=((both.total, rank),), cut=both.cut(0))
    q_norm = q_b = None
    if q_rank is not None:
        q_norm = shelf.new(f"{p}.q_a_layernorm.weight", q_rank)
        q_b = shelf.new(f"{p}.q_b_proj.weight", queries.size, q_rank, cut=queries.cut(0))
    return MlaWeights(
        inputs=_stacked(shelf, parts, hidden),
        q_norm=q_norm,
        q_b=q_b,
        kv_norm=shelf.new(f"{p}.kv_a_layernorm.weight", rank),
        kv_b=kv_b,
        out=shelf.new(f"{p}.o_proj.weight", hidden, values.size, cut=values.cut(1)),
    )


def _mlp(shelf: Shelf, p: str, hidden: int, own: Piece) -> MlpWeights:
    return MlpWeights(
        gate_up=_stacked(shelf, [(f"{p}.gate_proj", own), (f"{p}.up_proj", own)], hidden),
        down=shelf.new(f"{p}.down_proj.weight", hidden, own.size, cut=own.cut(1)),
    )


def _moe(shelf: Shelf, p: str, moe: MoeSpec, hidden: int, packed: bool, shard: Shard) -> MoeWeights:
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
        experts=(_packed if packed else _experts)(
            shelf, f"{p}.experts.*", moe, latent or hidden, shard
        ),
        shared=_mlp(
            shelf,
            f"{p}.shared_experts",
            hidden,
            shard.shared(moe.width * moe.num_shared),
        )
        if moe.num_shared
        else None,
    )


def _experts(shelf: Shelf, p: str, moe: MoeSpec, width: int, shard: Shard) -> ExpertStack:
    own, inner = shard.owned(moe.num_experts), shard.expert_width(moe.width)
    places = max(len(own), shard.places)
    w13 = shelf.empty(places, 2 * inner.size, width)
    w2 = shelf.empty(places, width, inner.size)
    for name, dest, cut in _three(w13, w2, inner):
        shelf.put(f"{p}.{name}.weight", dest, experts=moe.num_experts, cut=cut, owned=own)
    return ExpertStack(w13=w13, w2=w2)


def _packed(shelf: Shelf, p: str, moe: MoeSpec, width: int, shard: Shard) -> ExpertStack:
    own, inner, u8 = shard.owned(moe.num_experts), shard.expert_width(moe.width), torch.uint8
    tensors, places = [], max(len(own), shard.places)
    for suffix, each in (("packed", 2), ("scale", 32)):
        w13 = shelf.empty(places, 2 * inner.size, width // each, dtype=u8)
        w2 = shelf.empty(places, width, inner.size // each, dtype=u8)
        for name, dest, cut in _three(w13, w2, inner):
            bytes_ = cut if cut is None or cut.dim == 0 else cut.divided(each)
            shelf.put(
                f"{p}.{name}.weight_{suffix}",
                dest,
                kind="u8",
                experts=moe.num_experts,
                cut=bytes_,
                owned=own,
            )
        tensors += [w13, w2]
    return ExpertStack(w13=tensors[0], w2=tensors[1], w13_scale=tensors[2], w2_scale=tensors[3])


def _three(w13: Tensor, w2: Tensor, inner: Piece) -> list[tuple[str, Tensor, Cut | None]]:
    """The three matrices of all experts, where they go, and what of them is read."""
    w1, w3 = w13[:, : inner.size], w13[:, inner.size :]
    return [("w1", w1, inner.cut(0)), ("w3", w3, inner.cut(0)), ("w2", w2, inner.cut(1))]


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
