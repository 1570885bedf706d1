"""Train the nano model: `python -m benchmarks.nano.train --out DIR`; README.md has the recipe.

Writes a checkpoint directory and log.jsonl. A run is as long as `--steps` or `--seconds` say.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from multiprocessing import Value
from pathlib import Path

import torch

from benchmarks.nano import export
from benchmarks.nano.network import Network
from benchmarks.nano.packing import Batches, Shape, loader
from benchmarks.nano.training import Report, Schedule, Trainer
from common.config.checkpoint import load_spec

BUNDLED = Path(__file__).parent.parent.parent / "checkpoints" / "nano"


@dataclass
class Clock:
    """How much of the run is done."""

    steps: int  # 0: by time
    seconds: float
    step: int = 0

    def __post_init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    @property
    def progress(self) -> float:
        return min(1.0, self.step / self.steps if self.steps else self.elapsed / self.seconds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--like", type=Path, default=BUNDLED, help="its config and tokenizer are used"
    )
    parser.add_argument("--resume", type=Path, help="a checkpoint directory to continue from")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="without --steps")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=2e-3)
    parser.add_argument("--flat", type=float, default=0.35)
    parser.add_argument("--rounded-from", type=float, default=0.7)
    parser.add_argument("--data-from", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    schedule = Schedule(
        matrix_rate=options.matrix_rate,
        other_rate=options.other_rate,
        flat=options.flat,
        rounded_from=options.rounded_from,
        data_from=options.data_from,
    )
    place = Value("d", schedule.data(0.0))
    shape = Shape(rows=options.rows, length=options.length, images=options.images)
    device = torch.device(options.device)
    data = Batches(options.like, shape, options.seed, place)
    batches = iter(loader(data, options.workers, pin=device.type == "cuda"))
    first = next(batches)  # the workers start before CUDA does
    network = Network(load_spec(options.like))
    if options.resume:
        export.load(network, options.resume)
    trainer = Trainer(network, schedule, device)
    if device.type == "cuda":
        trainer.capture(first)
    clock = Clock(options.steps, options.seconds)
    with (options.out / "log.jsonl").open("w") as log:
        line = 0.0
        while (progress := clock.progress) < 1.0:
            place.value = schedule.data(progress)
            report = trainer.step(next(batches), progress)
            clock.step += 1
            if clock.elapsed >= line or clock.progress >= 1.0:
                line = clock.elapsed + 5.0
                record = _record(clock, report)
                print(record, flush=True)
                log.write(record + "\n")
    export.save(network, options.like, options.out)


def _record(clock: Clock, report: Report) -> str:
    loads = report.loads
    values = {
        "step": clock.step,
        "seconds": clock.elapsed,
        "progress": clock.progress,
        "loss": report.loss.item(),
        "accuracy": report.accuracy.item(),
        "imbalance": (loads.max(1).values / loads.mean(1)).mean().item(),
    }
    return json.dumps({key: round(value, 4) for key, value in values.items()})


if __name__ == "__main__":
    main()
