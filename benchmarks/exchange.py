"""Time the exchange of rows with experts over ranks, and a decode step that has it inside.

    python -m benchmarks.exchange --devices 2 --out FILE.jsonl     two GPUs, over NCCL and directly
    python -m benchmarks.exchange --devices 1 --ranks 4            ranks that share one GPU
    python -m benchmarks.exchange --devices 0                      gloo on the host

Ranks are processes of this host. First dispatch and combine of one layer, for some numbers of rows
a rank, beside what the wire would take for the bytes that leave a rank; then a layer over tensor
ranks, its rows spread or not, the shared expert overlapped or not; then (on GPUs) a decode step
of four layers of true width (`benchmarks.slice`), each rank a lane with its share of 896 experts,
captured as one CUDA graph with the direct exchange or NIXL's kernels inside and compared with the
same step over the all-to-all. Prints one JSON line a case: median and spread. Times of ranks that
share a device are no speeds: their kernels take turns.
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
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.ops.select import choose
from common.ops.table import REFERENCE, Ops
from common.parallel.choice import open_exchange
from common.parallel.collectives import Axis, open_axes
from common.parallel.exchange import Exchange
from common.parallel.mesh import Mesh
from common.parallel.nixl_ep import NixlEp
from common.parallel.placement import even, routes

EXPERTS, TOP, WIDTH = 896, 16, 3584
WIRE = 450e9  # bytes a second out of an H200 over NVLink: its data sheet
ROUNDS, WARM = 30, 5
CONTEXT = 1024
RECORDED = ("nixl_ep", "direct")  # what a captured step may hold


class Bench:
    """One rank's part."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.ranks = args, args.rank, args.ranks
        self.failed = False
        self.device, self.groups = torch.device("cpu"), 0
        if args.devices:
            self.device = torch.device("cuda", args.rank % args.devices)
            torch.cuda.set_device(self.device)
        alone = args.devices >= args.ranks
        self.backend = "nccl" if alone else "gloo"
        store = self.store = dist.FileStore(args.store, args.ranks)
        store.set_timeout(timedelta(seconds=120))
        self.mesh = Mesh(data=args.ranks, expert=args.ranks)
        self.axes = open_axes(self.mesh, args.rank, store, backend=self.backend, patience_s=120)

    def prefixed(self, name: str) -> Any:
        """The store for groups of another mesh; all ranks ask in the same order."""
        self.groups += 1
        return dist.PrefixStore(f"{name}/{self.groups}", self.store)

    def ops(self, *, exact: bool = False) -> Ops:
        """Bodies for packed experts on a GPU, the definitions on the host."""
        if not self.args.devices:
            return REFERENCE
        from benchmarks.slice import SPEC

        wanted = {"quantization": "mxfp4", "dtype": torch.bfloat16, "device": self.device}
        return choose("triton", SPEC, **wanted, exact=exact)[0]

    @property
    def axis(self) -> Axis:
        return self.axes["expert"]

    def open(self, name: str, rows: int, **sizes: Any) -> Exchange:
        true = {
            "top": TOP,
            "width": WIDTH,
            "experts": -(-EXPERTS // self.ranks),
            "dtype": torch.bfloat16,
        }
        return open_exchange(name, self.axis, rows=rows, **(true | sizes), device=self.device)

    def run(self) -> None:
        names = ["all_to_all", *RECORDED] if self.args.devices else ["all_to_all"]
        for rows in self.args.rows:
            for name in names:
                self.attempt(lambda name=name, rows=rows: self.exchange(name, rows))
        for rows in self.args.layer_rows:
            self.attempt(lambda rows=rows: self.layer(rows))
        if self.args.devices and not self.args.no_step:
            self.attempt(self.steps)
        if self.args.agreement:
            self.attempt(self.agreement)

    def attempt(self, part: Callable[[], None]) -> None:
        """One part's failure is told and does not take the others along, where all ranks fail."""
        try:
            part()
        except Exception:
            traceback.print_exc(limit=-4)
            self.failed = True

    def say(self, case: dict[str, Any], times: list[float], **more: Any) -> None:
        low, _, high = statistics.quantiles(times, n=4)
        taken = {
            "median_us": round(statistics.median(times) * 1e6, 1),
            "spread_us": round((high - low) / 2 * 1e6, 1),
        }
        self.note(case, **taken, **more)

    def note(self, case: dict[str, Any], **more: Any) -> None:
        """Print one line, and keep it where asked; the first rank's."""
        if self.rank:
            return
        line = {
            "benchmark": "exchange",
            **case,
            "ranks": self.ranks,
            "devices": self.args.devices,
            "over": self.backend,
            **more,
            "device": torch.cuda.get_device_name() if self.args.devices else "cpu",
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)
        if self.args.out:
            with Path(self.args.out).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def time(self, call: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
        """Seconds of each call, all ranks starting together."""
        times = []
        for _ in range(WARM + rounds):
            self.synchronize()
            self.axis.all_reduce(torch.zeros(1, device=self.device))
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return times[WARM:]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def exchange(self, name: str, rows: int) -> None:
        """Dispatch and combine of one layer; experts make nothing of the rows."""
        draw = torch.Generator().manual_seed(self.rank)
        ids = torch.rand(rows, EXPERTS, generator=draw).topk(TOP, -1).indices.sort(-1).values
        ids = ids.to(self.device)
        table = routes(even(EXPERTS, self.ranks), EXPERTS, self.device)
        z = torch.randn(rows, WIDTH, generator=draw).to(self.device, torch.bfloat16)
        keep = torch.ones(rows, dtype=torch.bool, device=self.device)
        weights = torch.ones(rows, TOP, device=self.device)
        exchange = self.open(name, rows)

        def both() -> torch.Tensor:
            arrived = exchange.dispatch(z, ids, keep, table)()
            return exchange.combine(arrived.rows, arrived, weights)

        away = int((table.share[ids, 0] != self.rank).sum())
        sent = 2 * away * WIDTH * 2
        more = {"sent_bytes": sent, "wire_us": round(sent / WIRE * 1e6, 1)}
        error = (both().float() - TOP * z.float()).abs().max() / z.float().abs().max()
        more["error"] = round(float(error), 5)  # 16 equal rows added up, rounded once to bf16
        if name in RECORDED:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both()
            self.say({"what": name, "graph": True, "rows": rows}, self.time(graph.replay), **more)
        self.say({"what": name, "graph": False, "rows": rows}, self.time(both), **more)
        if isinstance(exchange, NixlEp):
            exchange.close()

    def layer(self, rows: int) -> None:
        """One layer over tensor ranks: rows spread or not, the shared expert overlapped or not."""
        from benchmarks.exchange_layer import measure

        measure(self, rows)

    def agreement(self) -> None:
        """How far the exchanges' steps are apart, and from fp32."""
        from benchmarks.exchange_agreement import measure

        for batch in self.args.batches:
            measure(self, batch, CONTEXT)

    def steps(self) -> None:
        """A decode step of the slice, as this rank's lane, over each exchange in turn."""
        from benchmarks.exchange_slice import Lane

        for batch in self.args.batches:
            lane = Lane(self, batch, CONTEXT)
            case = {"what": "decode step", "batch": batch, "context": CONTEXT}
            wanted = lane.eager("all_to_all")
            for name in RECORDED:
                self.attempt(partial(self.step, lane, name, case, wanted))
            call = lane.call("all_to_all")
            self.say({**case, "exchange": "all_to_all", "graph": False}, self.time(call, 10))

    def step(self, lane: Any, name: str, case: dict[str, Any], wanted: torch.Tensor) -> None:
        """One exchange's steps, captured and eager, against the all-to-all's logits."""
        eager = lane.eager(name)
        graph, replayed = lane.captured(name)
        lane.fresh()
        graph.replay()
        self.synchronize()
        scale = wanted.abs().max()
        checks = {
            "eager_off": round(float((eager - wanted).abs().max() / scale), 5),
            "graph_off": round(float((replayed - wanted).abs().max() / scale), 5),
            "finite": bool(replayed.isfinite().all()),
        }
        case = {**case, "exchange": name}
        self.say({**case, "graph": True}, self.time(graph.replay, 20), **checks)
        self.say({**case, "graph": False}, self.time(lane.call(name), 10))
        del graph
        lane.forget(name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=0, help="GPUs; 0: gloo on the host")
    parser.add_argument("--ranks", type=int, default=0, help="as many as devices, and two at least")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--layer-rows", type=int, nargs="*", default=[64, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 256], help="of a step")
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--agreement", action="store_true", help="steps beside fp32: many GiB")
    parser.add_argument("--small", action="store_true", help="steps of a small slice: a trial")
    parser.add_argument("--out", default="")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--store", default="")
    args = parser.parse_args()
    args.ranks = args.ranks or max(2, args.devices)
    if args.devices > (there := torch.cuda.device_count()):
        parser.error(f"--devices is {args.devices}, and there are {there}; ask for that many")
    if args.rank >= 0:
        torch.set_num_threads(1)
        with torch.inference_mode():
            bench = Bench(args)
            bench.run()
        sys.stdout.flush()
        os._exit(int(bench.failed))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:], "--store", store]
        command += ["--ranks", str(args.ranks)]
        ranks = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(args.ranks)]
        sys.exit(await_all(ranks))


def await_all(ranks: list[subprocess.Popen[bytes]], within_s: float = 900.0) -> int:
    """Wait for every rank; the first that fails, or time, ends the others, which would wait for
    it. Returns the exit status."""
    until = time.monotonic() + within_s
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.2)
        return max(1 if rank.poll() is None else abs(rank.returncode) for rank in ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


if __name__ == "__main__":
    main()
