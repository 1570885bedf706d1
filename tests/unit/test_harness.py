"""The benchmark harness: what it measures, and that a figure is kept with its machine."""

import json
import subprocess

import pytest

from benchmarks import harness


def test_warm_up_is_not_measured_and_both_minimums_hold() -> None:
    calls = []
    now = iter(range(1000))
    timing = harness.measure(
        lambda: calls.append(1), warm=4, runs=5, least_s=0.0, clock=lambda: float(next(now))
    )
    assert (len(calls), timing.runs) == (9, 5)
    timing = harness.measure(
        lambda: None, warm=0, runs=2, least_s=7.0, clock=lambda: float(next(now))
    )
    assert timing.runs == 7


def test_quantiles_are_those_of_the_measured_times() -> None:
    timing = harness.summary([float(i) for i in range(101)])
    found = (timing.p05, timing.p25, timing.p50, timing.p75, timing.p95)
    assert found == pytest.approx((5.0, 25.0, 50.0, 75.0, 95.0))


def test_figures_are_appended_with_machine_commit_and_spread(tmp_path) -> None:
    timing = harness.summary([1.0, 2.0, 3.0])
    for rows in (1, 2):
        harness.record("thing", {"rows": rows}, timing, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "thing.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == [{"rows": 1}, {"rows": 2}]
    assert lines[0]["seconds"]["p50"] == 2.0
    assert lines[0]["machine"]["cores"] >= 1
    assert {"cpu", "python", "versions", "load"} <= lines[0]["machine"].keys()
    assert lines[0]["commit"] != ""


def test_a_part_that_the_script_for_two_devices_does_not_know_is_told_and_counted(tmp_path) -> None:
    script = harness.ROOT / "benchmarks" / "two_devices.sh"
    told = subprocess.run([script, tmp_path, "nothing"], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (1, "no part is called nothing\n")
    assert list(tmp_path.iterdir()) == []
