"""Small ranks as processes: each serves its cut of a tiny model over gloo and keeps its logits.

`python -m tests.support.team JOB RANK`: the job file names the checkpoints, the layouts and a
folder; all ranks run the layouts in the same order and the first rank of each lane writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from common.config.checkpoint import load_spec
from common.model.batch import Memory, Share, StepBatch
from common.model.text import TextModel
from common.ops.select import choose
from common.ops.table import REFERENCE
from common.parallel.collectives import open_axes
from common.parallel.mesh import Mesh, narrowed
from common.parallel.placement import Placement
from common.parallel.team import join
from common.runtime.graphs import GraphedModel
from common.runtime.recorder import Cuda, Eager, Recorder
from common.weights import load_text
from common.weights.shares import shard_of
from tests.support.models import Request, allocate, pages_for
from tests.support.processes import ROOT

STEPS = 2
PROMPTS = {0: 70, 1: 17, 2: 5}  # request -> tokens of its prompt
BEGINS = {0: 0, 1: 1, 2: 0}  # request -> pass in which its lane would first take it


def prompt_of(request: int, stepwise: bool = False) -> list[int]:
    count = 1 if stepwise else PROMPTS[request]
    return [(37 * request + 11 * i + 5) % 490 for i in range(count)]


def following(request: int) -> list[int]:
    return [(101 * request + 7 * i + 3) % 490 for i in range(STEPS)]


@dataclass
class Lane:
    """The requests of one lane and what is to be fed next; of recorded ones all as steps."""

    numbers: list[int]
    stepwise: bool = False

    def __post_init__(self) -> None:
        self.requests, page = {}, 0
        prompts = {n: prompt_of(n, self.stepwise) for n in self.numbers}
        for slot, (number, prompt) in enumerate(prompts.items()):
            need = pages_for(len(prompt) + STEPS)
            self.requests[number] = Request(slot, tuple(range(page, page + need)))
            page += need
        self.pages = page
        self.left = {n: [prompt, *[[t] for t in following(n)]] for n, prompt in prompts.items()}

    def batch(self, at: int) -> tuple[StepBatch | None, list[int]]:
        """The lane's pass number `at`: prompts that begin first, then steps; None when idle."""
        live = [n for n in self.numbers if self.left[n] and BEGINS[n] <= at]
        new = [n for n in live if len(self.left[n]) == 1 + STEPS and not self.stepwise]
        chosen = new or live
        if not chosen:
            return None, []
        shares: list[Share] = [self.requests[n].share(self.left[n].pop(0)) for n in chosen]
        return StepBatch(kind="chunks" if new else "steps", shares=tuple(shares)), chosen


def lanes_of(mesh: Mesh, stepwise: bool = False) -> list[Lane]:
    numbers = ([n for n in PROMPTS if n % mesh.data == lane] for lane in range(mesh.data))
    return [Lane(own, stepwise) for own in numbers]


PASSES = 1 + max(BEGINS.values()) + STEPS + 1
RECORDERS = {"cuda": Cuda, "eager": Eager}  # of layouts whose steps are recorded, by name
MOST = len(PROMPTS)  # rows of a step


class Recorded:
    """Steps over a recorder, as a room runs them."""

    def __init__(self, model: TextModel, memory: Memory, lane: Lane, recorder: Recorder) -> None:
        width = max(1, lane.pages)
        self.steps = GraphedModel(model, memory, most=MOST, width=width, recorder=recorder)

    def forward(self, batch: StepBatch, memory: Memory) -> torch.Tensor:
        return self.steps.forward(batch, memory).clone()  # valid until the next pass

    def idle(self, memory: Memory) -> None:
        self.steps.idle()


def run(model: TextModel | Recorded, memory: Memory, lane: Lane) -> dict[str, torch.Tensor]:
    """All passes of a lane: logits by request, [1 + STEPS, vocab]."""
    rows: dict[int, list[torch.Tensor]] = {n: [] for n in lane.numbers}
    for at in range(PASSES):
        batch, numbers = lane.batch(at)
        if batch is None:
            model.idle(memory)
            continue
        for number, logits in zip(numbers, model.forward(batch, memory), strict=True):
            rows[number].append(logits)
    return {str(number): torch.stack(logits) for number, logits in rows.items()}


def serve(job: dict, layout: dict, rank: int, store) -> None:
    """One layout on one rank."""
    mesh = Mesh(**layout["mesh"])
    if rank >= mesh.world:
        return
    directory = Path(job["checkpoints"][layout["variant"]])
    spec = load_spec(directory)
    placement = Placement(tuple(map(tuple, layout["shares"]))) if "shares" in layout else None
    prefixed = dist.PrefixStore(layout["name"], store)
    axes = open_axes(mesh, rank, prefixed, backend=job.get("backend", "gloo"))
    device = job.get("device", "cpu")
    if job.get("backend") == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    weights = load_text(
        directory,
        spec,
        dtype=torch.float32,
        device=device,
        packed=layout.get("packed", False),
        shard=shard_of(mesh, rank, spec.text, placement),
    )
    recorder = RECORDERS.get(layout.get("recorded", ""))
    ops, more = REFERENCE, {}
    if recorder is not None and device != "cpu":
        more = {"exchange": "direct", "rows": MOST}
        ops, _ = choose(
            "auto",
            narrowed(spec.text, mesh),
            quantization="mxfp4" if layout.get("packed") else None,
            dtype=torch.float32,
            device=torch.device(device),
        )
    team = join(mesh, rank, axes, spec.text, placement=placement, device=device, **more)
    model = TextModel(spec.text, weights, team=team, ops=ops, exact=ops is REFERENCE)
    lane = lanes_of(mesh, recorder is not None)[team.seat.lane]
    memory = allocate(
        narrowed(spec.text, mesh), slots=max(1, len(lane.numbers)), pages=max(1, lane.pages)
    )
    moved = {name: getattr(memory, name).to(device) for name in ("state", "conv", "latent")}
    memory = Memory(**moved)
    made = model if recorder is None else Recorded(model, memory, lane, recorder())
    logits = run(made, memory, lane)
    out = Path(job["out"])
    save_file({"load": team.load.cpu()}, out / f"{layout['name']}.load{rank}.safetensors")
    if team.seat.tensor == 0:
        found = {name: value.cpu() for name, value in logits.items()}
        save_file(found, out / f"{layout['name']}.{team.seat.lane}.safetensors")


def main(job_file: str, rank: int) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    store = dist.FileStore(job["store"], job["world"])
    store.set_timeout(timedelta(seconds=60))
    for layout in job["layouts"]:
        serve(job, layout, rank, store)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads must not outlive the store


def start(job_file: Path, world: int) -> list[subprocess.Popen]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.team", str(job_file), str(rank)],
            cwd=ROOT,
            env=environment,
        )
        for rank in range(world)
    ]


def finish(ranks: Sequence[subprocess.Popen], *, within_s: float) -> None:
    """Wait for all; on a failure or when time is up, end the others by id."""
    until = time.monotonic() + within_s
    try:
        for rank, process in enumerate(ranks):
            code = process.wait(max(0.1, until - time.monotonic()))
            assert code == 0, f"rank {rank} ended with {code}"
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
