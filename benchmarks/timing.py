"""Time device work: captured launches, replayed between events, the median and its spread.

A case's launches are captured into one CUDA graph, so the gaps of Python are not in the numbers;
the functions given to `measure` are called in turn, each on its own buffers, so that a cache does
not hold what memory should. It knows nothing about ops.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

REPLAYS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call: the median over replays, and half the middle half's width."""

    us: float
    spread: float


def measure(
    calls: Sequence[Callable[[], object]], *, replays: int = REPLAYS, graph: bool = True
) -> Timing:
    """Time one call of `calls`, which are run one after another in every replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    def eager() -> None:
        for call in calls:
            call()

    run: Callable[[], object] = eager
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            eager()
        run = captured.replay
    for _ in range(2):
        run()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    quarter = statistics.quantiles(times, n=4)
    return Timing(us=statistics.median(times), spread=(quarter[2] - quarter[0]) / 2)


def machine() -> dict[str, str]:
    """The device and the versions that a figure belongs to."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }


def append(path: Path, case: dict[str, object]) -> None:
    """Add one JSON line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(case) + "\n")
