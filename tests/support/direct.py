"""A rank of the direct exchange as a process: its windows are files in shared memory, or CUDA's.

`python -m tests.support.direct FOLDER RANK WORLD DEVICE`: sends random rows to experts whose
outputs are known, idle and padded ones among them, round after round, and compares. On a CUDA
device a round is also captured once and replayed.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.ops.exchange import Layout
from common.parallel.collectives import open_axes
from common.parallel.direct import Direct, open_direct
from common.parallel.mesh import Mesh
from common.parallel.placement import Placement, Routes, routes
from common.parallel.window import Window

ROWS, TOP, WIDTH, EXPERTS, ROUNDS = 4, 3, 48, 7, 4


def shared(folder: Path, rank: int, world: int) -> Direct:
    """Windows as files that every process maps."""
    layout = Layout(ranks=world, places=ROWS * TOP, width=WIDTH, dtype=torch.float32)
    files = [folder / f"window{other}" for other in range(world)]
    maps = [
        torch.from_file(str(file), shared=True, size=layout.size, dtype=torch.uint8)
        for file in files
    ]
    addresses = torch.tensor([one.data_ptr() for one in maps])
    window = Window(own=maps[rank], addresses=addresses)
    direct = Direct(rank, window, layout, EXPERTS)
    direct.maps = maps  # type: ignore[attr-defined]  # mapped as long as it lives
    return direct


def placed(world: int, turn: int) -> Placement:
    """Experts over the ranks, one of them everywhere; another in every turn."""
    shares = [[e for e in range(EXPERTS) if e % world == (s + turn) % world] for s in range(world)]
    return Placement(tuple(tuple(sorted({*share, turn})) for share in shares))


class Case:
    """One rank's rows of a round, and what must come back."""

    def __init__(self, rank: int, turn: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(100 * turn + rank)
        count = 0 if (turn + rank) % 4 == 3 else ROWS  # idle in some rounds
        self.rows = torch.randn(count, WIDTH, generator=draw).to(device)
        chosen = torch.rand(count, EXPERTS, generator=draw).topk(TOP, -1).indices
        self.ids = chosen.sort(-1).values.to(device)
        self.weights = torch.rand(count, TOP, generator=draw).to(device)
        self.keep = (torch.rand(count, generator=draw) < 0.7).to(device)

    def wanted(self) -> torch.Tensor:
        number = self.ids.unsqueeze(-1).float()
        made = self.rows.unsqueeze(1) * (number + 1) + number
        return (made * self.weights.unsqueeze(-1)).sum(1) * self.keep.unsqueeze(1)


def run(direct: Direct, case: Case, table: Routes, own: torch.Tensor) -> torch.Tensor:
    """One round; `own` are the logical experts of this rank by place."""
    arrived = direct.dispatch(case.rows, case.ids, case.keep, table)()
    number = own[arrived.local].unsqueeze(1)
    return direct.combine(arrived.rows * (number + 1) + number, arrived, case.weights)


def numbers(share: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Logical numbers by place; a place that is none makes what would be noticed."""
    known = [float(e) for e in share]
    return torch.tensor(known + [float("nan")] * (EXPERTS + 1 - len(known)), device=device)


def main(folder: Path, rank: int, world: int, device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cpu":
        direct = shared(folder, rank, world)
    else:
        torch.cuda.set_device(device)
        store = dist.FileStore(str(folder / "store"), world)
        store.set_timeout(timedelta(seconds=60))
        axis = open_axes(Mesh(data=world, expert=world), rank, store)["expert"]
        direct = open_direct(
            axis, rows=ROWS, top=TOP, width=WIDTH, dtype=torch.float32, experts=EXPERTS,
            device=device,
        )  # fmt: skip
    for turn in range(ROUNDS):
        case, placement = Case(rank, turn, device), placed(world, turn)
        table = routes(placement, EXPERTS, device)
        found = run(direct, case, table, numbers(placement.shares[rank], device))
        torch.testing.assert_close(found, case.wanted(), rtol=1e-5, atol=1e-5)
    if device.type == "cuda":
        captured(direct, rank, world, device)
    sys.stdout.flush()
    os._exit(0)


def captured(direct: Direct, rank: int, world: int, device: torch.device) -> None:
    """The same rounds by replay of one graph; rows, choices and routes change in place."""
    case, table = Case(rank, 0, device), routes(placed(world, 0), EXPERTS, device, most=world)
    full = Case(world, 0, device)  # of a rank that is not idle
    own = numbers(placed(world, 0).shares[rank], device)
    graph = torch.cuda.CUDAGraph()
    case.rows, case.ids, case.weights, case.keep = full.rows, full.ids, full.weights, full.keep
    run(direct, case, table, own)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run(direct, case, table, own)
    for turn in range(ROUNDS):
        new = Case(rank, 4 * turn + (3 - rank % 4 + 1), device)
        for name in ("rows", "ids", "weights", "keep"):
            getattr(case, name).copy_(getattr(new, name))
        table.take(routes(placed(world, turn), EXPERTS, device, most=world))
        own.copy_(numbers(placed(world, turn).shares[rank], device))
        graph.replay()
        torch.testing.assert_close(out, case.wanted(), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch.device(sys.argv[4]))
