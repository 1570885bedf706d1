"""A step by parts: floors by hand, the projection's sums, and whose a profiler's kernels are."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.report import render
from benchmarks.slice import SPEC
from benchmarks.step import prefill_us
from benchmarks.step_parts import SLICE, kernels, part_of, prompt_floors
from common.config.checkpoint import parse_spec
from common.config.release import RELEASE
from common.config.step import LEAST_S, REACHED, Rates, Rows, exchanged, floors, projected, touched

K3 = parse_spec(RELEASE)
RATES = Rates(copy=1.0, flops=1e30, network=50e9)  # seconds are bytes


def bytes_of(**rows: int) -> dict[str, float]:
    return floors(SLICE, "bfloat16", Rows(**rows), RATES)


def test_floors_of_the_slice_are_its_bytes_counted_by_hand() -> None:
    found = bytes_of(lane=4, context=1000)
    assert found["KDA products"] == 3 * 2 * (7168 * (5 * 12288 + 128 + 96) + 128 * 12288)
    assert found["KDA step"] == 3 * 4 * 96 * (2 * 128 * 128 * 4 + 2 * 9 * 128 * 2)
    assert found["attention"] == 2 * 4 * 1000 * 576 + 2 * 96 * 256 * 512
    assert found["latent products"] == 3 * 2 * 2 * 3584 * 7168
    assert found["dense network"] == 2 * 3 * 33792 * 7168
    chosen = 896 * (1 - (1 - 16 / 896) ** 4)
    assert found["routed experts"] == pytest.approx(3 * chosen * 3 * 3072 * 3584 * (0.5 + 1 / 32))


def test_ranks_cut_what_they_cut_and_repeat_the_rest() -> None:
    whole, cut = bytes_of(lane=4, context=1000), bytes_of(lane=4, context=1000, tensor=8, expert=8)
    for part in ("KDA step", "shared expert", "dense network", "head", "routed experts"):
        assert cut[part] == pytest.approx(whole[part] / 8)
    for part in ("router", "latent products", "residual mixing"):
        assert cut[part] == whole[part]
    assert whole["attention"] / 8 < cut["attention"] < whole["attention"]
    assert touched(SLICE, 0) == 0 and touched(SLICE, 64) == pytest.approx(0.685, abs=1e-3)


def test_attention_of_many_heads_is_bound_by_flops() -> None:
    rates = dataclasses.replace(RATES, flops=1.0)
    found = floors(SLICE, "bfloat16", Rows(lane=2, context=1000), rates)["attention"]
    assert found == 2 * 2 * 1000 * 96 * (2 * 512 + 64)


def test_a_projection_adds_what_ranks_say_to_each_other() -> None:
    rates = dataclasses.replace(RATES, copy=4.274e12)
    alone = projected(K3, "bfloat16", Rows(lane=8, context=8192), rates)
    assert alone.keys() == {*REACHED, "small launches and gaps"}
    least = floors(K3, "bfloat16", Rows(lane=8, context=8192), rates)
    assert alone["head"] == pytest.approx(least["head"] / REACHED["head"])
    assert alone["router"] == 92 * LEAST_S["router"] > least["router"] / REACHED["router"]
    rows = Rows(lane=8, context=8192, tensor=8, data=2, expert=16)
    ranks = projected(K3, "bfloat16", rows, rates)
    assert ranks["reductions"] == 2 * 93 * 12e-6
    assert ranks["exchange of experts"] == 92 * (40e-6 + exchanged(K3, rows) / 50e9)
    assert exchanged(K3, rows) == 2 * 16 * 7168 * 15 // 16


def test_floors_of_a_prompt_add_up_to_the_whole_passes() -> None:
    found = prompt_floors(SPEC, 8192)
    assert sum(found.values()) == pytest.approx(prefill_us(8192) / 1e6, rel=1e-9)


def event(cat: str, ts: float, dur: float = 1.0, name: str = "", to: int = -1) -> dict:
    args = {"correlation": to} if to >= 0 else {}
    return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "args": args}


def test_a_kernel_belongs_to_the_calls_around_its_launch() -> None:
    trace = {
        "traceEvents": [
            event("user_annotation", 0, 10, "part:kda"),
            event("user_annotation", 2, 3, "part:linear 8x4"),
            event("cuda_runtime", 3, to=1),
            event("cuda_driver", 6, to=2),
            event("cuda_runtime", 20, to=3),
            event("kernel", 50, 7.0, to=1),
            event("kernel", 60, 8.0, to=2),
            event("gpu_memcpy", 70, 9.0, to=3),
        ]
    }
    assert list(kernels(trace)) == [(("kda", "linear 8x4"), 7.0), (("kda",), 8.0), ((), 9.0)]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (("kda", "linear 49376x7168"), "KDA products"),
        (("kda", "kda_mix"), "KDA step"),
        (("mla", "mla_steps"), "attention"),
        (("mla", "rms_norm"), "small, in attention"),
        (("ffn", "widened 896x7168"), "router"),
        (("ffn", "linear 7168x3584"), "latent products"),
        (("ffn", "linear 12288x7168"), "shared expert"),
        (("ffn", "linear 67584x7168"), "dense network"),
        (("ffn", "experts"), "routed experts"),
        (("residual_read",), "residual mixing"),
        (("linear 163840x7168",), "head"),
        ((), "small, elsewhere"),
    ],
)
def test_a_call_is_named_by_where_it_stands_and_what_it_multiplies(path, part: str) -> None:
    assert part_of(path, SPEC) == part


def test_the_page_shows_parts_with_their_launches() -> None:
    line = {
        "op": "parts",
        "case": {"batch": 8, "context": 8192, "part": "router"},
        "who": "body", "us": 10.0, "floor_us": 5.0, "of_floor": 0.5, "launches": 6, "machine": {},
    }  # fmt: skip
    shown = render([line])
    assert "| batch 8, context 8192 | router | 5.0 | 10.0 | 0.50 | 6 |" in shown


def test_a_column_that_was_renamed_holds_its_old_lines_and_the_new_ones_win() -> None:
    def line(who: str, each: int, us: float) -> dict[str, object]:
        timing = {"us": us, "floor_us": 5.0, "of_floor": 5.0 / us}
        return {"op": "experts", "case": {"each": each}, "who": who, "machine": {}, **timing}

    old, new = "body, two products", "bf16 unit, two products"
    shown = render([line(old, 1, 20.0), line(old, 4, 25.0), line(new, 1, 10.0)])
    assert f"| case | floor | {new} |" in shown
    assert "| each 1 | 5.0 | 10.0 (0.50) |" in shown
    assert "| each 4 | 5.0 | 25.0 (0.20) |" in shown
