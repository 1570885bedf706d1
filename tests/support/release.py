"""The release's tensor list written out by hand, and a sparse checkpoint with its true headers.

Independent of the product's own table of names, so that the one can be checked with the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from common.config.release import RELEASE
from common.weights.write import Planned, write_sharded

H, INNER, EXPERTS = 7168, 12288, 896
MLA = {*range(3, 92, 4), 92}


def tensors() -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and dtype of all 497,220 tensors, layer by layer, vision last."""
    p = "language_model.model"
    yield f"{p}.embed_tokens.weight", [163840, H], "BF16"
    for layer in range(93):
        yield from layer_tensors(layer)
    yield f"{p}.norm.weight", [H], "BF16"
    yield f"{p}.output_attn_res_norm.weight", [H], "BF16"
    yield f"{p}.output_attn_res_proj.weight", [1, H], "BF16"
    yield "language_model.lm_head.weight", [163840, H], "BF16"
    yield from vision_tensors()


def layer_tensors(layer: int) -> Iterator[tuple[str, list[int], str]]:
    p = f"language_model.model.layers.{layer}"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{p}.{name}.weight", [H], "BF16"
    for part in ("self_attention", "mlp"):
        yield f"{p}.{part}_res_norm.weight", [H], "BF16"
        yield f"{p}.{part}_res_proj.weight", [1, H], "BF16"
    a = f"{p}.self_attn"
    yield f"{a}.g_proj.weight", [INNER, H], "BF16"
    yield f"{a}.o_proj.weight", [H, INNER], "BF16"
    if layer in MLA:
        for name, shape in {
            "q_a_proj": [1536, H],
            "q_a_layernorm": [1536],
            "q_b_proj": [18432, 1536],
            "kv_a_proj_with_mqa": [576, H],
            "kv_a_layernorm": [512],
            "kv_b_proj": [24576, 512],
        }.items():
            yield f"{a}.{name}.weight", shape, "BF16"
    else:
        for x in "qkv":
            yield f"{a}.{x}_proj.weight", [INNER, H], "BF16"
            yield f"{a}.{x}_conv1d.weight", [INNER, 1, 4], "F32"
        yield f"{a}.b_proj.weight", [96, H], "BF16"
        yield f"{a}.f_a_proj.weight", [128, H], "BF16"
        yield f"{a}.f_b_proj.weight", [INNER, 128], "BF16"
        yield f"{a}.A_log", [128], "F32"
        yield f"{a}.dt_bias", [INNER], "F32"
        yield f"{a}.o_norm.weight", [128], "F32"
    if layer == 0:
        yield from mlp(f"{p}.mlp", 33792)
        return
    m = f"{p}.block_sparse_moe"
    yield f"{m}.gate.weight", [EXPERTS, H], "BF16"
    yield f"{m}.gate.e_score_correction_bias", [EXPERTS], "F32"
    yield f"{m}.routed_expert_down_proj.weight", [3584, H], "BF16"
    yield f"{m}.routed_expert_norm.weight", [3584], "BF16"
    yield f"{m}.routed_expert_up_proj.weight", [H, 3584], "BF16"
    for e in range(EXPERTS):
        for w, packed, scale in (
            ("w1", [3072, 1792], [3072, 112]),
            ("w2", [3584, 1536], [3584, 96]),
            ("w3", [3072, 1792], [3072, 112]),
        ):
            yield f"{m}.experts.{e}.{w}.weight_packed", packed, "U8"
            yield f"{m}.experts.{e}.{w}.weight_scale", scale, "U8"
    yield from mlp(f"{m}.shared_experts", 6144)


def mlp(p: str, width: int) -> Iterator[tuple[str, list[int], str]]:
    yield f"{p}.gate_proj.weight", [width, H], "BF16"
    yield f"{p}.up_proj.weight", [width, H], "BF16"
    yield f"{p}.down_proj.weight", [H, width], "BF16"


def vision_tensors() -> Iterator[tuple[str, list[int], str]]:
    shapes = {
        "vision_tower.patch_embed.proj": [1024, 3, 14, 14],
        "vision_tower.patch_embed.pos_emb": [64, 64, 1024],
        "vision_tower.encoder.final_layernorm": [1024],
        "mm_projector.proj.0": [4096, 4096],
        "mm_projector.proj.2": [H, 4096],
        "mm_projector.post_norm": [H],
    }
    for b in range(27):
        p = f"vision_tower.encoder.blocks.{b}"
        shapes |= {f"{p}.norm0": [1024], f"{p}.norm1": [1024]}
        shapes |= {f"{p}.wqkv": [4608, 1024], f"{p}.wo": [1024, 1536]}
        shapes |= {f"{p}.mlp.fc0": [4096, 1024], f"{p}.mlp.fc1": [1024, 4096]}
    for name, shape in shapes.items():
        yield f"{name}.weight", shape, "BF16"


def write_release(directory: Path) -> list[str]:
    """`config.json`, the index and 96 sparse shards; returns the shards' names."""
    (directory / "config.json").write_text(json.dumps(RELEASE))
    planned = [Planned(name, dtype, tuple(shape)) for name, shape, dtype in tensors()]
    total = sum(t.size for t in planned)
    return write_sharded(directory, planned, int(total / 95.5), None)
