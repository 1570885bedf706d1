"""The figures of docs/operate.md are what the simulator gives, and they keep what the page says."""

from __future__ import annotations

import pytest

from benchmarks.scaling import HEAD, SCENES, row
from tests.support.processes import ROOT

PAGE = (ROOT / "docs/operate.md").read_text()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.name} {scene.stage}")
def test_a_line_of_the_page_is_what_the_simulator_gives(scene):
    line = row(scene)
    assert f"\n{line}\n" in PAGE, "run `python -m benchmarks.scaling`"
    _, _, _, _, changes, turns, _, devices, _ = (cell.strip() for cell in line.split("|"))
    used, budget = devices.split(" of ")
    assert int(used) <= int(budget)
    assert int(turns) <= 1 and int(changes) <= 4


def test_the_page_has_the_head_and_no_other_line():
    table = PAGE[PAGE.index(HEAD) + len(HEAD) :].split("\n\n")[0]
    assert len(table.strip().splitlines()) == len(SCENES)
