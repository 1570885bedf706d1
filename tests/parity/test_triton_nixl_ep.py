"""NIXL's expert-parallel exchange: what is made of rows around the package's kernels, and rows out
and back over the package itself where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from common.errors import RoomLost
from common.ops.exchange.packing import NEW, OLD, packing_of
from common.parallel.nixl_ep import MODULE, NixlEp
from common.parallel.placement import routes
from tests.support.packed import (
    EXPERTS,
    PLACES,
    ROUNDS,
    ROWS,
    Case,
    Library,
    Meeting,
    begin,
    end,
    numbers,
    placed,
)
from tests.support.processes import ROOT
from tests.support.team import finish
from tests.support.triton_ops import DEVICE

WIDTH = 40


def rank_of(meeting: Meeting, rank: int, top: int, kernels=OLD) -> NixlEp:
    world = meeting.all.parties
    p = packing_of(kernels, ranks=world, rows=ROWS, top=top, width=WIDTH, experts=PLACES)
    made = NixlEp(Library(rank, PLACES, meeting), rank, p, DEVICE)
    made.prove()
    return made


@pytest.mark.parametrize(
    ("world", "top", "kernels"), [(2, 3, OLD), (3, 16, OLD), (2, 16, NEW), (2, 13, OLD)]
)
def test_rows_reach_their_experts_and_come_back_added_up(world, top, kernels) -> None:
    meeting = Meeting(world)

    def run(rank: int) -> None:
        one = rank_of(meeting, rank, top, kernels)
        for turn in range(ROUNDS):
            case, placement = Case(rank, turn, DEVICE, top=top, width=WIDTH), placed(world, turn)
            arrived = begin(one, case, routes(placement, EXPERTS, DEVICE))()
            case.same(end(one, arrived, numbers(placement.shares[rank], DEVICE), case))
            one.check()

    meeting.run(run)


def test_a_rank_that_falls_silent_voids_every_output_and_is_named_at_the_second_look() -> None:
    meeting = Meeting(2)

    def run(rank: int) -> None:
        one = rank_of(meeting, rank, 3)
        one._buffer.silent = [1] if rank == 0 else []
        case, placement = Case(rank, 0, DEVICE, top=3, width=WIDTH), placed(2, 0)
        arrived = begin(one, case, routes(placement, EXPERTS, DEVICE))()
        out = end(one, arrived, numbers(placement.shares[rank], DEVICE), case)
        assert bool(out.isnan().all()) == (rank == 0)
        one.check()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if rank == 0:
            with pytest.raises(RoomLost, match=r"ranks \[1\] .* did not answer rank 0 within 30 s"):
                one.check()
        else:
            one.check()

    meeting.run(run)


def start(folder, devices: list[str], top: int, width: int) -> list[subprocess.Popen]:
    """A rank for each device named; one may be named again."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    args = [sys.executable, "-m", "tests.support.packed", str(folder)]
    more = [str(top), str(width)]
    return [
        subprocess.Popen(
            [*args, str(rank), str(len(devices)), device, *more], cwd=ROOT, env=environment
        )
        for rank, device in enumerate(devices)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("top", "width"), [(8, 4096), (16, 3584)])
def test_rows_go_out_and_back_over_the_package(tmp_path, top, width) -> None:
    pytest.importorskip(MODULE, reason="nixl-cu13 has no expert-parallel kernels for this torch")
    finish(start(tmp_path, 2 * ["cuda:0"], top, width), within_s=120)


@pytest.mark.multigpu
def test_rows_cross_between_two_devices(tmp_path) -> None:
    pytest.importorskip(MODULE, reason="nixl-cu13 has no expert-parallel kernels for this torch")
    finish(start(tmp_path, ["cuda:0", "cuda:1"], 16, 3584), within_s=120)
