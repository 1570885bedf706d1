"""Every published form of a checkpoint loads as the same weights; the rest is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config.checkpoint import load_spec
from common.errors import CheckpointError
from common.ops.quant import unpack_fp8
from common.weights import load_text, load_vision, weight_identity
from common.weights.tree import KdaWeights, TextWeights
from tests.support.golden import generator, write_tiny

KDA = "language_model.model.layers.0.self_attn"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"


@pytest.fixture(scope="module")
def k3(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("k3"), "k3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("packed"), "k3-mxfp4", num_hidden_layers=2)


def changed(
    source: Path,
    out: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None],
    **text,
) -> Path:
    """A copy of a checkpoint with other tensors and other keys of `text_config`."""
    tensors = load_file(source / "model.safetensors")
    tensors = change(tensors) or tensors
    config = json.loads((source / "config.json").read_text())
    config["text_config"].update(text)
    (out / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors")
    return out


def text_of(directory: Path, **options) -> TextWeights:
    return load_text(directory, load_spec(directory), dtype=torch.float32, **options)


def flat(value: object) -> list[Tensor]:
    """All tensors of a tree of weights, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [t for item in value for t in flat(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in flat(getattr(value, name))]
    return []


def assert_same(a: TextWeights, b: TextWeights) -> None:
    for x, y in zip(flat(a), flat(b), strict=True):
        assert torch.equal(x, y)


def test_packed_and_plain_experts_are_the_same_weights(k3, packed) -> None:
    assert_same(text_of(k3), text_of(packed))


def test_experts_may_stay_packed(packed) -> None:
    stack = text_of(packed, packed=True).layers[1].ffn.experts
    assert stack.w13.dtype == torch.uint8 and stack.w13_scale is not None
    assert stack.w13.shape == (16, 256, 64) and stack.w2_scale.shape == (16, 128, 4)


def test_plain_experts_load_although_the_config_names_a_quantisation(k3, packed, tmp_path) -> None:
    quantization = json.loads((packed / "config.json").read_text())["text_config"]
    mixed = changed(
        k3, tmp_path, lambda _: None, quantization_config=quantization["quantization_config"]
    )
    assert_same(text_of(k3), text_of(mixed))


def test_names_without_the_inner_model_load(k3, tmp_path) -> None:
    def shorten(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            k.replace("language_model.model.", "language_model."): v for k, v in tensors.items()
        }

    assert_same(text_of(k3), text_of(changed(k3, tmp_path, shorten)))


@pytest.mark.parametrize("shape", [(4,), (64,), (1, 1, 4, 1)])
def test_a_log_loads_in_its_three_shapes_and_padding_is_not_used(k3, tmp_path, shape) -> None:
    def reshape(tensors: dict[str, Tensor]) -> None:
        for name in [k for k in tensors if k.endswith("A_log")]:
            count = torch.Size(shape).numel()
            tensors[name] = tensors[name][:count].reshape(shape)

    mixer = text_of(changed(k3, tmp_path, reshape)).layers[0].mixer
    assert isinstance(mixer, KdaWeights) and mixer.rate.shape == (4,)
    stored = load_file(k3 / "model.safetensors")[f"{KDA}.A_log"]
    assert torch.equal(mixer.rate, stored[:4].exp())


def test_fp8_blocks_load_as_their_values(k3, tmp_path) -> None:
    name = "language_model.model.layers.0.mlp.down_proj.weight"
    expert = f"{EXPERT}.weight"
    kept: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for key in (name, expert):
            scale = torch.rand(-(-tensors[key].shape[0] // 128), -(-tensors[key].shape[1] // 128))
            tensors[key] = tensors[key].to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = scale
            kept[key] = unpack_fp8(tensors[key], scale, torch.float32)

    directory = changed(k3, tmp_path, quantise, quantization_config={"quant_method": "fp8"})
    weights = text_of(directory)
    assert torch.equal(weights.layers[0].ffn.down, kept[name])
    assert torch.equal(weights.layers[1].ffn.experts.w2[3], kept[expert])
    block = kept[name][:128, 128:256]
    raw = load_file(directory / "model.safetensors")
    expected = raw[name].float()[:128, 128:256] * raw[f"{name}_scale_inv"][0, 1]
    assert torch.equal(block, expected)


def test_a_truncated_config_loads_from_whole_and_from_cut_files(tmp_path) -> None:
    make = generator()
    whole = write_tiny(tmp_path / "whole", "k3", num_hidden_layers=5)
    listed = make.K3_TEXT["linear_attn_config"]  # names nine layers
    for name, layers in (("cut", 3), ("all", 5)):
        (tmp_path / name).mkdir()

        def cut(tensors: dict[str, Tensor], layers: int = layers) -> dict[str, Tensor]:
            dropped = [f".layers.{i}." for i in range(layers, 9)]
            return {k: v for k, v in tensors.items() if not any(d in k for d in dropped)}

        changed(whole, tmp_path / name, cut, num_hidden_layers=3, linear_attn_config=listed)
    assert_same(text_of(tmp_path / "cut"), text_of(tmp_path / "all"))


def test_text_and_vision_read_only_their_own_tensors(k3, tmp_path) -> None:
    def text_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v for k, v in tensors.items() if k.startswith("language_model.")}

    def vision_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v for k, v in tensors.items() if not k.startswith("language_model.")}

    for name, keep in (("text", text_only), ("vision", vision_only)):
        (tmp_path / name).mkdir()
        changed(k3, tmp_path / name, keep)
    assert_same(text_of(k3), text_of(tmp_path / "text"))
    spec = load_spec(k3)
    both = (load_vision(d, spec, dtype=torch.float32) for d in (k3, tmp_path / "vision"))
    for x, y in zip(*map(flat, both), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(CheckpointError, match="lacks 18 tensors: vision_tower"):
        load_vision(tmp_path / "text", spec, dtype=torch.float32)


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop(f"{KDA}.dt_bias"), rf"lacks 1 tensors: {KDA}\.dt_bias"),
        (drop(f"{EXPERT}.weight"), rf"lacks 1 tensors: {EXPERT}\.weight"),
        (put("language_model.model.layers.0.extra.weight", torch.ones(1)), r"0\.extra\.weight"),
        (put(EXPERT.replace(".3.", ".16.") + ".weight", torch.ones(128, 128)), r"experts\.16\.w2"),
        (put(f"{KDA}.o_proj.weight", torch.ones(256, 255)), r"\[256, 255\], not \[256, 256\]"),
        (put(f"{KDA}.A_log", torch.ones(5)), r"A_log has shape \[5\]"),
        (put(f"{KDA}.o_proj.weight", torch.ones(256, 256).half()), "dtype F16, not F32"),
        (put(f"{KDA}.o_proj.weight_packed", torch.ones(256, 128).byte()), "only routed experts"),
        (
            put(f"{EXPERT}.weight_packed", torch.zeros(128, 64).byte()),
            rf"other half is missing of: {EXPERT}\.weight_packed",
        ),
    ],
)
def test_missing_surplus_misshapen_and_mistyped_tensors_are_refused_by_name(
    k3, tmp_path, change, says
) -> None:
    with pytest.raises(CheckpointError, match=says):
        text_of(changed(k3, tmp_path, change))


def test_a_weight_in_two_formats_is_refused(k3, tmp_path) -> None:
    def both(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.weight_packed"] = torch.zeros(128, 64).byte()
        tensors[f"{EXPERT}.weight_scale"] = torch.zeros(128, 4).byte()

    with pytest.raises(CheckpointError, match="second time in another format"):
        text_of(changed(k3, tmp_path, both))


def test_broken_cut_and_absent_files_are_refused_by_name(k3, tmp_path) -> None:
    spec = load_spec(k3)
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors"):
        load_text(tmp_path, spec, dtype=torch.float32)
    whole = (k3 / "model.safetensors").read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="cut short"):
        load_text(tmp_path, spec, dtype=torch.float32)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_text(tmp_path, spec, dtype=torch.float32)
    index = {"weight_map": {"a": "absent.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"absent\.safetensors does not exist"):
        load_text(tmp_path, spec, dtype=torch.float32)


def test_an_index_that_disagrees_with_its_files_is_refused(k3, tmp_path) -> None:
    file = "model-00001-of-00001.safetensors"
    tensors = load_file(k3 / "model.safetensors")
    save_file(tensors, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    spec = load_spec(k3)
    placed = dict.fromkeys(tensors, file)
    index.write_text(json.dumps({"weight_map": placed}))
    assert_same(text_of(k3), load_text(tmp_path, spec, dtype=torch.float32))
    index.write_text(json.dumps({"weight_map": placed | {"ghost": file}}))
    with pytest.raises(CheckpointError, match="places ghost"):
        load_text(tmp_path, spec, dtype=torch.float32)
    placed.pop(f"{KDA}.A_log")
    index.write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointError, match=rf"does not place {KDA}\.A_log"):
        load_text(tmp_path, spec, dtype=torch.float32)


def test_the_identity_changes_with_the_weights_and_only_with_them(k3, packed, tmp_path) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    same = changed(k3, tmp_path / "same", lambda _: None)

    def negate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: -v for k, v in tensors.items()}

    other = changed(k3, tmp_path / "other", negate)
    assert weight_identity(k3) == weight_identity(k3)
    assert len({weight_identity(d) for d in (k3, packed, other)}) == 3
    assert len(weight_identity(same)) == 32


PEAK = """
import sys, torch
from pathlib import Path
from common.config.checkpoint import load_spec
from common.weights import load_text
import common.model.text
torch.zeros(8, 8) @ torch.zeros(8, 8)
directory = Path(sys.argv[1])
spec = load_spec(directory)
def highest():  # ru_maxrss would know the parent's peak too
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = highest()
weights = load_text(directory, spec, dtype=torch.float32, progress=True)
print((highest() - before) * 1024)
assert highest() > before
"""


def test_loading_peaks_within_a_fifth_of_the_weights(tmp_path) -> None:
    """Measured as resident size in a fresh process, where nothing is left to reuse."""
    directory = write_tiny(
        tmp_path, "k3-mxfp4", num_hidden_layers=2, num_experts=64,
        routed_expert_hidden_size=512, moe_intermediate_size=512, vocab_size=8192,
    )  # fmt: skip
    spec = load_spec(directory)
    own = sum(t.numel() * t.element_size() for t in flat(text_of(directory)))
    assert own > 200e6 and spec.quantization == "mxfp4"
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(directory)], capture_output=True, text=True, cwd=root,
        check=True,
    )  # fmt: skip
    assert int(out.stdout) < 1.2 * own
    assert "B/s" in out.stderr and "text weights" in out.stderr
