"""A rank of the direct exchange as a process: its windows are files in shared memory, or CUDA's.

`python -m tests.support.direct FOLDER RANK WORLD DEVICE`: sends random rows to experts whose
outputs are known, idle and padded ones among them, round after round, and compares. Then values
are summed and gathered as tensor ranks do. Rounds are counted from shortly before 2^31. On a CUDA
device both are also captured once and replayed.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.ops.exchange import Layout
from common.parallel.collectives import open_axes
from common.parallel.direct import Direct, open_direct
from common.parallel.direct_axis import DirectAxis, open_direct_axis
from common.parallel.mesh import Mesh
from common.parallel.placement import Placement, Routes, routes
from common.parallel.window import Window

ROWS, TOP, WIDTH, EXPERTS, ROUNDS = 4, 3, 48, 7, 4
ROOM = 256  # bytes of a piece of a sum
LATE = (1 << 31) - 2  # rounds so far, as if
SUMS = [((3, 10), torch.float32), ((5, 30), torch.bfloat16), ((1, 2), torch.float32)]


def mapped(folder: Path, name: str, rank: int, world: int, size: int) -> Window:
    """Windows as files that every process maps."""
    files = [folder / f"{name}{other}" for other in range(world)]
    maps = [torch.from_file(str(f), shared=True, size=size, dtype=torch.uint8) for f in files]
    MAPS.extend(maps)
    return Window(own=maps[rank], addresses=torch.tensor([one.data_ptr() for one in maps]))


MAPS: list[torch.Tensor] = []  # mapped as long as the process lives


class Ranks:
    """Who sums on a host: only a place among others."""

    def __init__(self, rank: int, world: int) -> None:
        self.index, self.size = rank, world


def on_host(folder: Path, rank: int, world: int) -> tuple[Direct, DirectAxis]:
    from common.ops.exchange.triton_sums import Shelf

    layout = Layout(ranks=world, places=ROWS * TOP, width=WIDTH, dtype=torch.float32)
    window = mapped(folder, "window", rank, world, layout.size)
    shelf = mapped(folder, "shelf", rank, world, Shelf(ranks=world, room=ROOM).size)
    axis: Any = Ranks(rank, world)
    return Direct(rank, window, layout, EXPERTS), DirectAxis(axis, shelf, ROOM)


def on_device(
    folder: Path, rank: int, world: int, device: torch.device
) -> tuple[Direct, DirectAxis]:
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), world)
    store.set_timeout(timedelta(seconds=60))
    axis = open_axes(Mesh(data=world, expert=world), rank, store)["expert"]
    direct = open_direct(
        axis, rows=ROWS, top=TOP, width=WIDTH, dtype=torch.float32, experts=EXPERTS,
        device=device,
    )  # fmt: skip
    return direct, open_direct_axis(axis, ROOM, device)


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
        total = self.weights[:, :1] * made[:, 0]
        for j in range(1, TOP):
            total = total + self.weights[:, j : j + 1] * made[:, j]
        return torch.where(self.keep.unsqueeze(1), total, 0.0)


def run(direct: Direct, case: Case, table: Routes, own: torch.Tensor) -> torch.Tensor:
    """One round; `own` are the logical experts of this rank by place."""
    arrived = direct.dispatch(case.rows, case.ids, case.keep, table)()
    number = own[arrived.local].unsqueeze(1)
    return direct.combine(arrived.rows * (number + 1) + number, arrived, case.weights)


def numbers(share: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Logical numbers by place; a place that is none makes what would be noticed."""
    known = [float(e) for e in share]
    return torch.tensor(known + [float("nan")] * (EXPERTS + 1 - len(known)), device=device)


def parts(turn: int, world: int, device: torch.device) -> list[torch.Tensor]:
    """What the ranks bring to a sum."""
    shape, dtype = SUMS[turn % len(SUMS)]
    draw = torch.Generator().manual_seed(turn)
    return [torch.randn(shape, generator=draw).to(device, dtype) for _ in range(world)]


def total(brought: list[torch.Tensor]) -> torch.Tensor:
    """In order, in fp32, rounded once."""
    found = brought[0].float()
    for part in brought[1:]:
        found = found + part.float()
    return found.to(brought[0].dtype)


def summed(axis: DirectAxis, world: int, device: torch.device) -> None:
    for turn in range(2 * len(SUMS)):
        brought = parts(turn, world, device)
        own = brought[axis.index]
        found = axis.all_reduce(own.t()).t()
        wanted = total(brought)
        if device.type == "cpu" and own.dtype == torch.bfloat16:  # the interpreter cuts, not rounds
            torch.testing.assert_close(found, wanted, rtol=8e-3, atol=0)
        else:
            assert torch.equal(found, wanted)
        for found, other in zip(axis.all_gather(own), brought, strict=True):
            assert torch.equal(found, other)
    assert not axis.all_reduce(own[:0]).numel() and len(axis.all_gather(own[:0])) == world


def summed_again(axis: DirectAxis, world: int, device: torch.device) -> None:
    """By replay, with eager sums between, so that the turns are the device's to know."""
    own = parts(0, world, device)[axis.index].clone()
    axis.all_gather(axis.all_reduce(own))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = axis.all_reduce(own)
        every = axis.all_gather(found)
    for turn in range(0, 5 * len(SUMS), len(SUMS)):
        brought = parts(turn, world, device)
        own.copy_(brought[axis.index])
        graph.replay()
        assert torch.equal(found, total(brought))
        assert all(torch.equal(other, found) for other in every)
        axis.all_gather(own[:, :4])  # in one piece, so that turns change sides


def main(folder: Path, rank: int, world: int, device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cpu":
        direct, axis = on_host(folder, rank, world)
    else:
        direct, axis = on_device(folder, rank, world, device)
    direct._rounds.fill_(LATE)
    axis._rounds.fill_(LATE)
    for turn in range(ROUNDS):
        case, placement = Case(rank, turn, device), placed(world, turn)
        table = routes(placement, EXPERTS, device)
        found = run(direct, case, table, numbers(placement.shares[rank], device))
        assert torch.equal(found, case.wanted())
    summed(axis, world, device)
    if device.type == "cuda":
        captured(direct, rank, world, device)
        summed_again(axis, world, device)
    sys.stdout.flush()
    os._exit(0)


def captured(direct: Direct, rank: int, world: int, device: torch.device) -> None:
    """The same rounds by replay of one graph; rows, choices and routes change in place."""
    case, table = Case(rank, 0, device), routes(placed(world, 0), EXPERTS, device, most=world)
    full = Case(0, 0, device)  # of a rank that is not idle
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
        assert torch.equal(out, case.wanted())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch.device(sys.argv[4]))
