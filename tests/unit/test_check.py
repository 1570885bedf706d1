"""`baton check` and `baton slice`: headers alone decide, and a slice has the release's widths."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from common.config.checkpoint import load_spec, parse_spec
from common.config.release import RELEASE
from common.errors import CheckpointError, ConfigError
from common.weights.check import check
from common.weights.shares import Ranks, experts_of, is_cut
from common.weights.slice import planned, slice_config, write_slice
from common.weights.write import Planned, write_sharded
from tests.support import release
from tests.support.golden import GOLDEN, NANO, generator, write_tiny
from tests.support.models import Request, allocate, chunks, load
from tests.support.processes import ROOT


def test_the_products_names_and_shapes_are_the_releases() -> None:
    ours = {(t.name, t.shape, t.dtype) for t in planned(slice_of_release(0, 3))}
    names = {name for name, _, _ in ours}
    theirs = {(name, tuple(shape), dtype) for name, shape, dtype in release.tensors()}
    theirs = {t for t in theirs if t[0] in names or release_layer(t[0]) in range(4)}
    assert ours == theirs


def slice_of_release(first: int, last: int):
    return parse_spec(slice_config(RELEASE, first=first, last=last, experts=None, vision=True))


def release_layer(name: str) -> int | None:
    return int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None


def test_nano_is_checked_for_every_room() -> None:
    report = check(NANO, decode=Ranks(expert=4))
    rooms = [(r.room, r.rank) for r in report.readings]
    assert rooms == [("encoder", 0), ("prefill", 0), *(("decode", i) for i in range(4))]
    encoder, prefill, *decode = report.readings
    assert encoder.tensors + prefill.tensors == 914
    assert sum(r.bytes for r in decode) > prefill.bytes > decode[0].bytes
    lines = list(report.lines())
    assert "8 layers (6 KDA, 2 MLA)" in lines[0] and len(lines) == 7


def test_kimi_linear_and_the_small_twin_are_checked(tmp_path) -> None:
    assert [r.room for r in check(GOLDEN / "linear_mini").readings] == ["prefill", "decode"]
    twin = generator().K3_TEXT["linear_attn_config"] | {"use_full_rank_gate": True}
    twin = {k: v for k, v in twin.items() if k != "gate_lower_bound"}
    directory = write_tiny(tmp_path, "k3", linear_attn_config=twin, num_hidden_layers=4)
    assert load_spec(directory).text.kda.gate_lower_bound is None
    assert check(directory).readings[0].room == "encoder"


def test_a_gap_is_found_without_data(tmp_path) -> None:
    config = slice_config(RELEASE, first=0, last=1, experts=16, vision=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    everything = list(planned(parse_spec(config)))
    files = write_sharded(tmp_path, everything, 4 << 30, None)
    assert len(files) > 1
    check(tmp_path)
    for file in files:
        (tmp_path / file).unlink()
    gone = everything.pop(7)
    write_sharded(tmp_path, everything, 4 << 30, None)
    with pytest.raises(CheckpointError, match=gone.name.replace(".", r"\.")):
        check(tmp_path)
    everything.append(Planned(gone.name, gone.dtype, (*gone.shape, 2)))
    write_sharded(tmp_path, everything, 4 << 30, None)
    with pytest.raises(CheckpointError, match="has shape"):
        check(tmp_path)


@pytest.mark.slow
def test_the_whole_release_is_checked_in_seconds(tmp_path) -> None:
    files = release.write_release(tmp_path)
    assert len(files) == 96
    program = (
        "import sys, time\n"
        "from services.cli import main\n"
        "began = time.process_time()\n"
        "assert main(['check', sys.argv[1], '--prefill', '8x1', '--decode', '1x16']) == 0\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss knows the parent's peak too
        "peak = int(status.split('VmHWM:')[1].split()[0]) * 1024\n"
        "print(time.process_time() - began, peak)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]  # a process whose peak is its own
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.splitlines()[-1].split())
    assert seconds < 20
    assert peak < 1.5e9
    report = check(tmp_path, prefill=Ranks(tensor=8), decode=Ranks(expert=16))
    assert report.readings[0].tensors + report.readings[1].tensors == 497_220
    total = sum(Planned(*item[:1], item[2], tuple(item[1])).size for item in release.tensors())
    assert total == 1453.66 * 2**30 // 1 or abs(total / 2**30 - 1453.66) < 0.01


def test_ranks_that_do_not_divide_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 tensor ranks"):
        check(NANO, prefill=Ranks(tensor=3))
    with pytest.raises(ConfigError, match="17 expert ranks"):
        check(NANO, decode=Ranks(expert=17))


def test_every_expert_has_one_rank() -> None:
    for count in (1, 3, 7, 16):
        held = [e for r in range(count) for e in experts_of(r, Ranks(expert=count), 16)]
        assert held == list(range(16))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.o_proj.weight", True),
        ("model.layers.3.self_attn.kv_b_proj.weight", True),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", False),
        ("model.layers.3.self_attn.q_a_proj.weight", False),
        ("model.layers.0.self_attn.A_log", False),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", True),
        ("model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", False),
        ("model.layers.1.block_sparse_moe.gate.weight", False),
        ("language_model.lm_head.weight", True),
        ("model.norm.weight", False),
    ],
)
def test_tensor_ranks_cut_heads_and_widths_and_nothing_before_a_norm(name, cut) -> None:
    assert is_cut(name) == cut


def test_a_slice_of_nano_can_be_served(tmp_path) -> None:
    config = json.loads((NANO / "config.json").read_text())
    files = write_slice(tmp_path, first=2, last=4, experts=8, config=config, shard_bytes=1 << 20)
    assert len(files) > 1
    report = check(tmp_path)
    assert report.spec.text.kda_layers == (0, 2) and report.spec.text.mla_layers == (1,)
    assert report.spec.text.moe_layers == (0, 1, 2) and report.spec.vision is None
    loaded = load(tmp_path)
    memory = allocate(loaded.spec.text, slots=1, pages=2)
    logits = loaded.model.forward(chunks(Request(0, (0, 1)).share(range(70))), memory)
    assert torch.isfinite(logits).all() and 0.1 < logits.std() < 10


def test_a_slice_keeps_layer_kinds_and_widths_of_the_release() -> None:
    spec = slice_of_release(0, 3).text
    assert (spec.kda_layers, spec.mla_layers, spec.moe_layers) == ((0, 1, 2), (3,), (1, 2, 3))
    assert (spec.hidden, spec.moe.num_experts, spec.kda.inner) == (7168, 896, 12288)
    tail = slice_of_release(90, 92).text
    assert (tail.kda_layers, tail.mla_layers, tail.moe_layers) == ((0,), (1, 2), (0, 1, 2))


@pytest.mark.parametrize(("first", "last", "experts"), [(0, 93, None), (4, 3, None), (0, 0, 15)])
def test_a_slice_outside_the_model_is_refused(tmp_path, first, last, experts) -> None:
    with pytest.raises(ConfigError):
        write_slice(tmp_path, first=first, last=last, experts=experts)
