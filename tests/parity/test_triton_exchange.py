"""The direct exchange against what experts are known to make, over processes with one memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processes import ROOT
from tests.support.team import finish
from tests.support.triton_ops import GPU


def start(folder, devices: list[str]) -> list[subprocess.Popen]:
    """A rank for each device named; one may be named again."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if "cpu" in devices:
        environment["TRITON_INTERPRET"] = "1"
    args = [sys.executable, "-m", "tests.support.direct", str(folder)]
    return [
        subprocess.Popen([*args, str(rank), str(len(devices)), device], cwd=ROOT, env=environment)
        for rank, device in enumerate(devices)
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_rows_reach_their_experts_and_come_back_added_up(tmp_path, world) -> None:
    finish(start(tmp_path, world * ["cuda:0" if GPU else "cpu"]), within_s=120)


@pytest.mark.multigpu
def test_rows_cross_between_two_devices(tmp_path) -> None:
    finish(start(tmp_path, ["cuda:0", "cuda:1"]), within_s=120)
