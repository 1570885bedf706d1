"""The path of a new operator, as `deploy/try.sh` walks it; only the download is left out."""

from __future__ import annotations

import glob
import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

STEPS = ["install", "serve", "load", "scale", "scale", "kill", "upgrade", "look", "stop"]


@pytest.mark.slow
def test_a_new_operator_serves_scales_kills_upgrades_and_loses_no_request():
    before = set(glob.glob("/tmp/baton-try.*"))
    command = [ROOT / "deploy/try.sh", "--venv", sys.prefix]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"^(\w+) +\d+ s  (.+)$", done.stdout, re.M)
    steps = [step for step, _ in told]
    assert [s for i, s in enumerate(steps) if s != "look" or steps[i - 1] != "look"] == STEPS
    assert "prefill 3" in told[3][1] and "decode has 6 slots" in told[6][1]
    assert re.search(r"\{'answered': \d+\}; no process is left", told[-1][1])
    assert set(glob.glob("/tmp/baton-try.*")) == before


def test_a_trial_that_cannot_start_says_so_and_leaves_nothing(tmp_path):
    before = set(glob.glob("/tmp/baton-try.*"))
    command = [ROOT / "deploy/try.sh", "--venv", tmp_path / "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "install" in done.stdout
    assert set(glob.glob("/tmp/baton-try.*")) == before
