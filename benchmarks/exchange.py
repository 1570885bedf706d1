"""Time one layer's expert exchange: dispatch and combine of a lane's rows over several ranks.

`python -m benchmarks.exchange --ranks 2 --backend nccl --rows 64 --out results.jsonl` starts the
ranks as processes of this host (one GPU each with nccl) and prints one JSON line a case: median and
spread over repetitions, and the bytes a rank sends. Experts compute nothing here: outputs are the
rows themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.parallel.collectives import open_axes
from common.parallel.exchange import AllToAll
from common.parallel.mesh import Mesh
from common.parallel.placement import Routes, even, routes

ROUNDS, WARM = 50, 10


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    on_gpu = args.backend == "nccl"
    device = torch.device("cuda", args.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(args.store, args.ranks)
    mesh = Mesh(data=args.ranks, expert=args.ranks)
    axes = open_axes(mesh, args.rank, store, backend=args.backend)
    table = routes(even(args.experts, args.ranks), args.experts, device)
    exchange = AllToAll(axes["expert"])
    for rows in args.rows:
        times, sent = timed(exchange, table, rows, args, device)
        if args.rank == 0:
            print(json.dumps(line(args, rows, times, sent)), flush=True)
    os._exit(0)


def timed(
    exchange: AllToAll, table: Routes, rows: int, args: argparse.Namespace, device: torch.device
) -> tuple[list[float], int]:
    draw = torch.Generator().manual_seed(args.rank)
    scores = torch.rand(rows, args.experts, generator=draw)
    ids = scores.topk(args.top, -1).indices.sort(-1).values.to(device)
    z = torch.randn(rows, args.width, generator=draw).to(device, torch.bfloat16)
    keep = torch.ones(rows, dtype=torch.bool, device=device)
    times, sent = [], 0
    for _ in range(ROUNDS + WARM):
        synchronize(device)
        started = time.perf_counter()
        arrived = exchange.dispatch(z, ids, keep, table)()
        exchange.combine(arrived.rows, arrived)
        synchronize(device)
        times.append(time.perf_counter() - started)
        away = sum(arrived.sent) - arrived.sent[args.rank]
        sent = 2 * away * args.width * z.element_size()
    return times[WARM:], sent


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def line(args: argparse.Namespace, rows: int, times: list[float], sent: int) -> dict[str, object]:
    ordered = sorted(times)
    return {
        "benchmark": "exchange",
        "backend": args.backend,
        "ranks": args.ranks,
        "rows": rows,
        "top": args.top,
        "experts": args.experts,
        "width": args.width,
        "median_us": round(statistics.median(ordered) * 1e6, 1),
        "p10_us": round(ordered[len(ordered) // 10] * 1e6, 1),
        "p90_us": round(ordered[len(ordered) * 9 // 10] * 1e6, 1),
        "sent_bytes": sent,
        "device": torch.cuda.get_device_name(0) if args.backend == "nccl" else "cpu",
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--store", default="")
    args = parser.parse_args()
    if args.rank >= 0:
        rank_main(args)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:], "--store", store]
        ranks = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(args.ranks)]
        for rank in ranks:
            rank.wait(300)


if __name__ == "__main__":
    main()
