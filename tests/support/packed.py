"""Rows for NIXL's expert-parallel exchange, and what must come back.

`python -m tests.support.packed FOLDER RANK WORLD DEVICE TOP WIDTH`: a rank as a process, over the
package. It sends random rows to experts whose outputs are known, idle and padded ones among them,
eagerly and by replay of one graph; at last rank 0 goes on alone, and must find the others silent.

`Library` stands in for the package where there is no GPU: the same calls, answered in torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import RoomLost
from common.parallel import nixl_ep
from common.parallel.collectives import open_axes
from common.parallel.exchange import Exchange
from common.parallel.mesh import Mesh
from common.parallel.nixl_ep_open import open_nixl_ep
from common.parallel.placement import Placement, Routes, routes

ROWS, EXPERTS, ROUNDS = 2, 17, 2
MANY = 40  # rows on a device


def placed(world: int, turn: int) -> Placement:
    """Experts over the ranks, one of them everywhere; another in every turn."""
    shares = [[e for e in range(EXPERTS) if e % world == (s + turn) % world] for s in range(world)]
    return Placement(tuple(tuple(sorted({*share, turn})) for share in shares))


PLACES = EXPERTS  # of a rank: a share of every turn fits


class Case:
    """One rank's rows of a round, and what must come back."""

    def __init__(
        self, rank: int, turn: int, device: torch.device, *, top: int, width: int, rows: int = ROWS,
        idle: bool = True,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(100 * turn + rank)
        count = 0 if idle and (turn + rank) % 3 == 2 else rows
        self.rows = torch.randn(count, width, generator=draw).to(device, torch.bfloat16)
        chosen = torch.rand(count, EXPERTS, generator=draw).topk(top, -1).indices
        self.ids = chosen.sort(-1).values.to(device)
        self.weights = torch.rand(count, top, generator=draw).to(device)
        self.keep = (torch.rand(count, generator=draw) < 0.7).to(device)

    def wanted(self) -> torch.Tensor:
        number = (self.ids.unsqueeze(-1).float() + 1) / 16
        made = (self.rows.unsqueeze(1).float() * number).to(torch.bfloat16).float()
        total = torch.zeros_like(self.rows, dtype=torch.float32)
        for j in range(self.ids.shape[1]):
            total = total + self.weights[:, j : j + 1] * made[:, j]
        return (total * self.keep.unsqueeze(1)).to(torch.bfloat16)

    def same(self, found: torch.Tensor) -> None:
        wanted = self.wanted()
        if found.device.type == "cpu":  # the interpreter cuts, not rounds
            torch.testing.assert_close(found, wanted, rtol=8e-3, atol=0)
        else:
            assert torch.equal(found, wanted)


def numbers(share: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Factors of experts by place; one that is none makes what would be noticed."""
    known = [(e + 1) / 16 for e in share]
    return torch.tensor(known + [float("nan")] * (PLACES + 1 - len(known)), device=device)


def begin(exchange: Exchange, case: Case, table: Routes) -> Any:
    return exchange.dispatch(case.rows, case.ids, case.keep, table)


def end(exchange: Exchange, arrived: Any, own: torch.Tensor, case: Case) -> torch.Tensor:
    made = (arrived.rows.float() * own[arrived.local].unsqueeze(1)).to(torch.bfloat16)
    return exchange.combine(made, arrived, case.weights)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Meeting:
    """Where ranks that are threads wait for each other; one runs at a time, for Triton's sake."""

    def __init__(self, ranks: int) -> None:
        self.turn, self.all = threading.Lock(), threading.Barrier(ranks, timeout=60)
        self.sent: dict[int, Any] = {}
        self.back: dict[tuple[int, int, int], torch.Tensor] = {}

    def wait(self) -> None:
        self.turn.release()
        try:
            self.all.wait()
        finally:
            self.turn.acquire()

    def run(self, rank: Callable[[int], None]) -> None:
        """Each rank in its thread; the first failure is raised here."""

        def held(number: int) -> None:
            with self.turn:
                try:
                    rank(number)
                except BaseException:
                    self.all.abort()
                    raise

        with ThreadPoolExecutor(self.all.parties) as pool:
            ended = [pool.submit(held, number) for number in range(self.all.parties)]
        failed = [one.exception() for one in ended if one.exception()]
        for error in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error


class Library:
    """What the package promises, for ranks that are threads of one process."""

    def __init__(self, rank: int, experts: int, meeting: Meeting) -> None:
        self.rank, self.experts, self.meeting = rank, experts, meeting
        self.ranks, self.silent = meeting.all.parties, list[int]()

    def get_local_buffer_tensor(self, dtype, size, *, offset, use_rdma_buffer):
        assert use_rdma_buffer and offset % 128 == 0
        self.home = torch.full(size, torch.nan, dtype=dtype, device=DEVICE)
        return self.home

    def dispatch(self, x, topk_idx, cap, num_experts, *, use_fp8, return_recv_hook):
        assert topk_idx.dtype == torch.int32 and x.dtype == torch.bfloat16 and not use_fp8
        assert len(x) <= cap and num_experts == self.ranks * self.experts and return_recv_hook
        assert self.ranks * cap % 4 == 0 and topk_idx.shape[1] <= 16
        self.meeting.sent[self.rank] = x.clone(), topk_idx.clone()
        came = torch.full((self.experts, self.ranks * cap, x.shape[1]), torch.nan).to(x)
        count = torch.zeros(self.experts, dtype=torch.int32, device=x.device)
        source: list[list[tuple[int, int]]] = [[] for _ in range(self.experts)]

        def arrive() -> None:
            self.meeting.wait()
            for rank in reversed(range(self.ranks)):  # in no order that could be relied on
                rows, ids = self.meeting.sent[rank]
                for row, chosen in ((r, c) for r in range(len(rows)) for c in ids[r].tolist()):
                    if chosen >= 0 and chosen // self.experts == self.rank:
                        e = chosen % self.experts
                        came[e, len(source[e])] = rows[row]
                        source[e].append((rank, row))
            count.copy_(torch.tensor([len(one) for one in source]))
            self.meeting.wait()

        return came, count, source, None, arrive

    def combine(self, x, topk_idx, topk_weights, handle, *, return_recv_hook):
        assert topk_idx.shape == topk_weights.shape and topk_weights.is_contiguous()
        assert x.is_contiguous() and return_recv_hook
        self.meeting.wait()
        self.meeting.back = {}
        self.meeting.wait()
        for e, rows in enumerate(handle):
            for slot, (rank, row) in enumerate(rows):
                number = self.rank * self.experts + e
                self.meeting.back[rank, number, row] = x[e, slot].clone()
        out = torch.full((len(topk_idx), x.shape[-1]), torch.nan).to(x)

        def arrive() -> None:
            self.meeting.wait()
            cap = x.shape[1] // self.ranks
            for (rank, number, row), value in self.meeting.back.items():
                if rank == self.rank:
                    self.home[number * cap + row, : x.shape[2]] = value
            for row, ids in enumerate(topk_idx.tolist()):
                total = torch.zeros(x.shape[-1], device=x.device)
                for j, chosen in enumerate(ids):
                    if chosen >= 0:
                        value = self.meeting.back[self.rank, chosen, row].float()
                        total = total + topk_weights[row, j] * value
                out[row] = total.to(x.dtype)
            self.meeting.wait()

        return out, None, arrive

    def query_mask_buffer(self, found: torch.Tensor) -> None:
        found.zero_()
        found[self.silent] = 1


def main(folder: Path, rank: int, world: int, device: torch.device, top: int, width: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    nixl_ep.TIMEOUT_MS = 6_000  # for the end of this: ranks that share a device take turns
    store = dist.FileStore(str(folder / f"store{top}-{width}"), world)
    store.set_timeout(timedelta(seconds=60))
    axis = open_axes(Mesh(data=world, expert=world), rank, store)["expert"]
    sizes = {"top": top, "width": width, "rows": MANY}
    exchange = open_nixl_ep(axis, **sizes, dtype=torch.bfloat16, experts=PLACES, device=device)
    for turn in range(3 * ROUNDS):
        case, placement = Case(rank, turn, device, **sizes), placed(world, turn)
        arrived = begin(exchange, case, routes(placement, EXPERTS, device))()
        case.same(end(exchange, arrived, numbers(placement.shares[rank], device), case))
        exchange.check()
    captured(exchange, rank, world, device, sizes)
    store.set(f"there/{rank}", "yes")
    store.wait([f"there/{other}" for other in range(world)])
    if rank == 0:
        alone(exchange, world, device, sizes)
    store.set(f"end/{rank}", "yes")
    store.wait([f"end/{other}" for other in range(world)])
    print(f"rank {rank} of {world}: {top} choices, {width} values: as wanted", flush=True)
    os._exit(0)


def captured(
    exchange: Exchange, rank: int, world: int, device: torch.device, sizes: dict[str, int]
) -> None:
    """Rounds by replay of one graph; rows, choices and routes change in place."""
    case = Case(rank, 0, device, **sizes, idle=False)
    table = routes(placed(world, 0), EXPERTS, device, most=world)
    own = numbers(placed(world, 0).shares[rank], device)

    def one() -> torch.Tensor:
        return end(exchange, begin(exchange, case, table)(), own, case)

    one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one()
    for turn in range(3 * ROUNDS):
        new = Case(rank, 40 + turn, device, **sizes, idle=False)
        for name in ("rows", "ids", "weights", "keep"):
            getattr(case, name).copy_(getattr(new, name))
        table.take(routes(placed(world, turn), EXPERTS, device, most=world))
        own.copy_(numbers(placed(world, turn).shares[rank], device))
        graph.replay()
        case.same(out)
        new.same(one())  # an eager round between two replays


def alone(exchange: Exchange, world: int, device: torch.device, sizes: dict[str, int]) -> None:
    """The others send nothing any more: outputs are void, and the second look says who it is."""
    case, placement = Case(0, 0, device, **sizes, idle=False), placed(world, 0)
    arrived = begin(exchange, case, routes(placement, EXPERTS, device))()
    out = end(exchange, arrived, numbers(placement.shares[0], device), case)
    assert out.isnan().all()
    exchange.check()
    torch.cuda.synchronize()
    try:
        exchange.check()
    except RoomLost as error:
        assert "ranks [1" in str(error) and "did not answer rank 0 within 6 s" in str(error)
    else:
        raise AssertionError("a silent rank went unnoticed")


if __name__ == "__main__":
    where = torch.device(sys.argv[4])
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), where, *map(int, sys.argv[5:7]))
