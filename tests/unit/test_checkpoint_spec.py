"""`config.json` to ModelSpec: the release, its small relatives, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest

from common.config.checkpoint import load_spec, parse_spec
from common.config.release import RELEASE
from common.errors import CheckpointError
from tests.support.golden import GOLDEN, NANO, generator


def changed(path: str, value: object) -> dict:
    config = copy.deepcopy(dict(RELEASE))
    table = config
    *tables, key = path.split(".")
    for name in tables:
        table = table[name]
    if value is None:
        del table[key]
    else:
        table[key] = value
    return config


def test_the_release_is_read() -> None:
    spec = parse_spec(RELEASE)
    assert (len(spec.text.kda_layers), len(spec.text.mla_layers)) == (69, 24)
    assert spec.text.mla_layers[:2] == (3, 7) and spec.text.mla_layers[-2:] == (91, 92)
    assert spec.text.moe_layers == tuple(range(1, 93))
    assert (spec.text.mla.latent_width, spec.text.kda.inner) == (576, 12288)
    assert (spec.text.kda.gate_lower_bound, spec.text.residual_block) == (-5.0, 12)
    assert (spec.eos, spec.media_pad, spec.quantization) == (163586, 163605, "mxfp4")
    assert spec.vision is not None and spec.vision.qkv_width == 1536
    assert spec.prefix == "language_model."


def test_nano_is_read() -> None:
    spec = load_spec(NANO)
    assert spec.text.mla_layers == (3, 7) and spec.text.residual_block == 3
    assert (spec.text.moe.top_k, spec.text.moe.latent, spec.quantization) == (4, 128, "mxfp4")
    assert spec.text.max_position == 8192


@pytest.mark.parametrize(
    ("variant", "quantization", "mla"),
    [("k3", None, (3, 7, 8)), ("k3-mxfp4", "mxfp4", (3, 7, 8)), ("linear", None, (3, 7, 8))],
)
def test_the_golden_generators_configs_are_read(variant, quantization, mla) -> None:
    make = generator()
    config = (
        make.linear_text() | {"dtype": "float32"}
        if variant == "linear"
        else make.k3_config(variant, "float32", {})
    )
    spec = parse_spec(config)
    assert (spec.quantization, spec.text.mla_layers) == (quantization, mla)
    assert spec.prefix == ("" if variant == "linear" else "language_model.")
    assert spec.text.dtype == "float32"


def test_kimi_linear_has_no_residual_blocks_latent_or_output_gate() -> None:
    spec = load_spec(GOLDEN / "linear_mini")
    assert spec.vision is None and spec.media_pad is None
    assert spec.text.residual_block is None and spec.text.moe.latent is None
    assert spec.text.kda.gate_lower_bound is None and not spec.text.kda.full_rank_gate
    assert not spec.text.mla.output_gate and spec.text.mla.q_lora_rank is None
    assert spec.text.moe.scaling == 2.446 and spec.text.activation == "silu"


def test_a_truncated_config_keeps_the_layers_it_has() -> None:
    spec = parse_spec(changed("text_config.num_hidden_layers", 6)).text
    assert spec.kda_layers == (0, 1, 2, 4, 5) and spec.mla_layers == (3,)
    assert (spec.num_layers, spec.listed_layers) == (6, 93)


def test_fp8_blocks_are_recognised_at_the_top_level() -> None:
    config = changed("text_config.quantization_config", None)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert parse_spec(config).quantization == "fp8"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model_type", "llama", "model_type"),
        ("text_config.hidden_size", None, "lacks `hidden_size`"),
        ("text_config.hidden_size", "7168", "of type int"),
        ("text_config.vocab_size", 0, "above 0"),
        ("text_config.num_hidden_layers", 94, "every layer from 1 to 94"),
        ("text_config.linear_attn_config.gate_lower_bound", -6.0, "at least -5"),
        ("text_config.mla_use_nope", False, "only form implemented"),
        ("text_config.tie_word_embeddings", True, "only form implemented"),
        ("text_config.hidden_act", "gelu", '"situ" or "silu"'),
        ("text_config.num_key_value_heads", 8, "96"),
        ("text_config.num_expert_group", 5, "divisor"),
        ("text_config.quantization_config.format", "int4", "MXFP4 packed"),
        ("vision_config.text_hidden_size", 4096, "7168"),
        ("vision_config.merge_kernel_size", [2, 1], "two equal"),
        ("vision_config.mm_projector_type", "patchmerger", "'patchmergerv2'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_key(path, value, says) -> None:
    with pytest.raises(CheckpointError, match=says):
        parse_spec(changed(path, value), source="x/config.json")


def test_a_missing_or_broken_file_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="JSON object"):
        load_spec(tmp_path)
