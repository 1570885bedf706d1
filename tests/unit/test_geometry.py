"""Geometry: worked examples of the release, checked by hand, and the bundled files' own sizes."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import geometry
from common.config.checkpoint import load_spec, parse_spec
from common.errors import ConfigError
from tests.support.golden import GOLDEN, NANO
from tests.unit.test_checkpoint_spec import RELEASE

GIB = 1 << 30
SPEC = parse_spec(RELEASE)
TEXT = SPEC.text
BF16 = "bfloat16"


def test_latents_of_the_release() -> None:
    assert geometry.page_bytes(TEXT, BF16, page_tokens=1) == 24 * 576 * 2 == 27_648
    assert geometry.page_bytes(TEXT, BF16) == 64 * 27_648
    assert 1_048_576 // 64 * geometry.page_bytes(TEXT, BF16) == 27 * GIB


def test_state_of_the_release() -> None:
    assert geometry.state_bytes(TEXT) == 69 * 96 * 128 * 128 * 4 == 434_110_464
    assert geometry.conv_bytes(TEXT, BF16) == 69 * 3 * 36_864 * 2 == 15_261_696
    assert geometry.slot_bytes(TEXT, BF16) == 449_372_160
    assert geometry.slot_bytes(TEXT, BF16, tensor=8) == 449_372_160 // 8


def test_slot_weighs_as_much_as_sixteen_thousand_tokens_of_latents() -> None:
    # 449,372,160 / 27,648 is 16,253.3: at 16,253 tokens the pages are still smaller.
    assert geometry.break_even_tokens(TEXT, BF16) == 16_254


def test_rows_of_one_token_of_the_release() -> None:
    assert geometry.embed_row_bytes(TEXT, BF16) == 14_336
    assert 16_817 * geometry.embed_row_bytes(TEXT, BF16) == 241_088_512
    assert geometry.bank_bytes(TEXT, BF16) == 8 * 14_336
    assert geometry.bank_bytes(replace(TEXT, residual_block=None), BF16) == 0


def test_weights_of_the_release() -> None:
    # One expert: 3 * 3072 * 3584 values of half a byte, and one scale byte for 32 of them.
    assert geometry.expert_bytes(SPEC, BF16) == 16_515_072 + 1_032_192
    weights = geometry.weights(SPEC, BF16)
    assert weights.experts == 92 * 896 * 17_547_264 == 1_446_456_066_048
    assert round((weights.text + weights.vision) / GIB, 2) == 106.55
    assert round(weights.total / GIB, 2) == 1453.66
    assert weights.rank(expert_ranks=16) == weights.text + weights.experts // 16


def test_stored_values_of_the_release() -> None:
    assert SPEC.vision is not None
    vision = geometry.vision_values(SPEC.vision)
    assert round(vision / 1e6, 1) == 447.4
    experts = geometry.weights(SPEC, BF16).experts  # of one byte each
    unused = 69 * (128 - 96)  # A_log is stored with 128 values a layer
    found = sum(geometry.text_values(TEXT)) + vision + experts
    assert found + unused == 1_503_647_073_024


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of one safetensors file, from its header alone."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())


def test_weights_of_the_bundled_checkpoint_are_the_bytes_of_its_file() -> None:
    spec = load_spec(NANO)
    unused = 6 * (64 - 4) * 4  # A_log of six layers, 64 fp32 values for 4 heads
    file_bytes = tensor_bytes(NANO / "model.safetensors")
    assert geometry.weights(spec, spec.text.dtype).total + unused == file_bytes


def test_unquantised_low_rank_weights_are_the_bytes_of_their_file() -> None:
    spec = load_spec(GOLDEN / "linear_mini")
    found = geometry.weights(spec, spec.text.dtype).total
    assert found == tensor_bytes(GOLDEN / "linear_mini" / "model.safetensors")


def test_fp8_experts_carry_one_scale_a_block() -> None:
    spec = replace(SPEC, quantization="fp8")
    assert geometry.expert_bytes(spec, BF16) == 3 * (3072 * 3584 + 24 * 28 * 4)
    assert geometry.expert_bytes(replace(SPEC, quantization=None), BF16) == 3 * 3072 * 3584 * 2


def test_memory_is_divided_into_whole_requests_and_the_rest_into_pages() -> None:
    page, slot = geometry.page_bytes(TEXT, BF16), geometry.slot_bytes(TEXT, BF16)
    request = slot + 128 * page  # 8,192 tokens
    fit = geometry.fit(TEXT, BF16, memory=3 * request + 5 * page + 7, tokens=8_191)
    assert fit == geometry.Fit(slots=3, pages=3 * 128 + 5, left=7)


def test_tensor_ranks_cut_states_and_not_latents() -> None:
    # 80 GiB at 8,192 tokens: 68.4 MB of state at 8 ranks against 226.5 MB of latents.
    fits = [
        geometry.fit(TEXT, BF16, memory=80 * GIB, tokens=8_192, tensor=tensor).slots
        for tensor in (1, 8)
    ]
    assert fits == [
        80 * GIB // (449_372_160 + 226_492_416),
        80 * GIB // (56_171_520 + 226_492_416),
    ]


def test_what_cannot_fit_or_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="give more memory"):
        geometry.fit(TEXT, BF16, memory=GIB // 4, tokens=64)
    with pytest.raises(ConfigError, match="96 heads cannot be cut over 7"):
        geometry.slot_bytes(TEXT, BF16, tensor=7)
    with pytest.raises(ConfigError, match="'int3' is unknown"):
        geometry.page_bytes(TEXT, "int3")
