"""Read a checkpoint's `config.json` into a ModelSpec.

The only place that knows how the release spells its configuration. It reads one JSON file and
never a tensor. Formulas and traps: docs/model.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.spec import CHUNK, KdaSpec, MlaSpec, ModelSpec, MoeSpec, TextSpec, VisionSpec
from common.config.table import Table
from common.errors import CheckpointError

__all__ = [
    "CHUNK",
    "KdaSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "TextSpec",
    "VisionSpec",
    "load_spec",
    "parse_spec",
]


def load_spec(directory: Path) -> ModelSpec:
    """Read `config.json` of a checkpoint directory.

    Raises:
        CheckpointError: the file is missing, is not JSON, or lacks or contradicts a key.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; give the directory of a checkpoint"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return parse_spec(raw, source=str(path))


def parse_spec(config: Mapping[str, Any], *, source: str = "config.json") -> ModelSpec:
    """Turn a parsed `config.json` into a spec; `source` names the file in errors.

    Raises:
        CheckpointError: a key is missing, has a value of another type, contradicts another key,
            or asks for something this implementation does not have.
    """
    wrapped = "text_config" in config
    top = Table(source, config)
    text = top.table("text_config") if wrapped else top
    kind = top.get("model_type", str, "kimi_linear")
    if kind not in ("kimi_k3", "kimi_linear"):
        top.refuse("model_type", kind, 'one of "kimi_k3" and "kimi_linear"')
    vision = top.table("vision_config") if config.get("vision_config") is not None else None
    ids = {key: _token_id(top, text, key, default) for key, default in _TOKEN_IDS}
    return ModelSpec(
        text=_text(text),
        vision=None if vision is None else _vision(vision, text.need("hidden_size", int)),
        prefix="language_model." if wrapped else "",
        quantization=_quantization(top, text),
        bos=ids["bos_token_id"],
        eos=ids["eos_token_id"],
        pad=ids["pad_token_id"],
        media_pad=top.get("media_placeholder_token_id", int, None),
    )


# What the release's own configuration class assumes where a key is absent.
_TOKEN_IDS = (("bos_token_id", 1), ("eos_token_id", 2), ("pad_token_id", 0))


def _token_id(top: Table, text: Table, key: str, default: int) -> int:
    table = top if top.values.get(key) is not None else text
    return int(table.get(key, int, default))


def _text(t: Table) -> TextSpec:
    linear = t.table("linear_attn_config")
    layers = t.positive("num_hidden_layers")
    kda, mla = _layer_lists(linear, layers)
    first_moe, every = t.get("first_k_dense_replace", int, 0), t.get("moe_layer_freq", int, 1)
    t.only("mla_use_nope", True)
    t.only("tie_word_embeddings", False)
    t.only("num_nextn_predict_layers", 0)
    t.only("moe_router_activation_func", "sigmoid")
    activation = t.get("hidden_act", str, "silu")
    if activation not in ("situ", "silu"):
        t.refuse("hidden_act", activation, '"situ" or "silu"')
    return TextSpec(
        hidden=t.positive("hidden_size"),
        num_layers=layers,
        vocab=t.positive("vocab_size"),
        kda=KdaSpec(
            num_heads=linear.positive("num_heads"),
            head_dim=linear.positive("head_dim"),
            conv_taps=linear.positive("short_conv_kernel_size"),
            gate_lower_bound=_lower_bound(linear),
            full_rank_gate=linear.get("use_full_rank_gate", bool, False),
        ),
        mla=_mla(t),
        moe=_moe(t),
        kda_layers=kda,
        mla_layers=mla,
        moe_layers=tuple(i for i in range(layers) if i >= first_moe and i % every == 0),
        dense_width=t.positive("intermediate_size"),
        activation=activation,
        situ_beta=t.get("activation_situ_beta", float, 1.0),
        situ_linear_beta=t.get("activation_situ_linear_beta", float, None),
        residual_block=t.get("attn_res_block_size", int, None),
        eps=t.get("rms_norm_eps", float, 1e-6),
        max_position=t.get("max_position_embeddings", int, t.get("model_max_length", int, 4096)),
        dtype=t.get("dtype", str, t.get("torch_dtype", str, "bfloat16")),
        listed_layers=max(
            layers, *linear.need("kda_layers", list), *linear.need("full_attn_layers", list)
        ),
    )


def _layer_lists(linear: Table, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """0-based KDA and MLA layers; entries beyond `layers` belong to a cut-off tail."""
    kda, mla = (
        tuple(sorted(int(i) - 1 for i in linear.need(key, list) if int(i) <= layers))
        for key in ("kda_layers", "full_attn_layers")
    )
    if sorted(kda + mla) != list(range(layers)):
        linear.refuse(
            "kda_layers",
            linear.values["kda_layers"],
            f"together with full_attn_layers every layer from 1 to {layers} exactly once",
        )
    return kda, mla


def _lower_bound(linear: Table) -> float | None:
    bound: float | None = linear.get("gate_lower_bound", float, None)
    if bound is not None and not -5.0 <= bound < 0.0:
        # Sixteen rows of -5 stay above the logarithm of the least fp32 number's inverse.
        linear.refuse("gate_lower_bound", bound, "at least -5 and below 0")
    return bound


def _mla(t: Table) -> MlaSpec:
    heads = t.positive("num_attention_heads")
    if t.get("num_key_value_heads", int, heads) != heads:
        t.refuse(
            "num_key_value_heads", t.values["num_key_value_heads"], f"{heads}, as many as heads"
        )
    return MlaSpec(
        num_heads=heads,
        q_lora_rank=t.get("q_lora_rank", int, None),
        kv_lora_rank=t.positive("kv_lora_rank"),
        nope_dim=t.positive("qk_nope_head_dim"),
        rope_dim=t.positive("qk_rope_head_dim"),
        v_dim=t.positive("v_head_dim"),
        output_gate=t.get("mla_use_output_gate", bool, False),
    )


def _moe(t: Table) -> MoeSpec:
    experts, groups = t.positive("num_experts"), t.get("num_expert_group", int, 1)
    if experts % groups:
        t.refuse("num_expert_group", groups, f"a divisor of num_experts ({experts})")
    return MoeSpec(
        num_experts=experts,
        top_k=t.positive("num_experts_per_token"),
        num_shared=t.get("num_shared_experts", int, 0),
        width=t.positive("moe_intermediate_size"),
        latent=t.get("routed_expert_hidden_size", int, None),
        latent_norm=t.get("latent_moe_use_norm", bool, False),
        renormalize=t.get("moe_renormalize", bool, True),
        scaling=t.get("routed_scaling_factor", float, 1.0),
        num_groups=groups,
        top_groups=t.get("topk_group", int, 1),
    )


_VISION_FORMS = (
    ("norm_type", "rmsnorm"),
    ("mlp_type", "mlp2"),
    ("activation_func", "gelu_pytorch_tanh"),
    ("pos_emb_interpolation_mode", "bilinear"),
    ("merge_type", "sd2_tpool"),
    ("mm_projector_type", "patchmergerv2"),
    ("projector_hidden_act", "gelu"),
)


def _vision(v: Table, hidden: int) -> VisionSpec:
    merge = v.get("merge_kernel_size", list, [2, 2])
    if len(merge) != 2 or merge[0] != merge[1]:
        v.refuse("merge_kernel_size", merge, "two equal numbers")
    v.only("text_hidden_size", hidden)
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        v.only(key, False)
    for key, supported in _VISION_FORMS:
        v.only(key, supported)
    return VisionSpec(
        patch=v.positive("patch_size"),
        merge=int(merge[0]),
        grid_height=v.positive("init_pos_emb_height"),
        grid_width=v.positive("init_pos_emb_width"),
        hidden=v.positive("vt_hidden_size"),
        num_layers=v.positive("vt_num_hidden_layers"),
        num_heads=v.positive("vt_num_attention_heads"),
        qkv_width=v.positive("qkv_hidden_size"),
        mlp_width=v.positive("vt_intermediate_size"),
        text_hidden=hidden,
        projector_eps=v.get("projector_ln_eps", float, 1e-5),
    )


def _quantization(top: Table, text: Table) -> str | None:
    table = top if top.values.get("quantization_config") is not None else text
    if table.values.get("quantization_config") is None:
        return None
    q = table.table("quantization_config")
    method, form = q.need("quant_method", str), q.get("format", str, "")
    if method == "compressed-tensors" and form == "mxfp4-pack-quantized":
        return "mxfp4"
    if method == "fp8" and q.get("weight_block_size", list, [128, 128]) == [128, 128]:
        return "fp8"
    q.refuse("quant_method", f"{method} {form}".strip(), "MXFP4 packed, or FP8 in 128 x 128 blocks")
