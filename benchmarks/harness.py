"""Time something on a CPU, say where, and keep the figure: one JSON line a case.

A figure without its machine, commit and spread is not kept. This knows nothing of what it times and
checks no result: that is a test's work.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call: the median, and the borders of the middle half and of nine tenths."""

    runs: int
    p50: float
    p25: float
    p75: float
    p05: float
    p95: float


def summary(seconds: list[float]) -> Timing:
    """Quantiles of measured times; at least two."""
    parts = quantiles(seconds, n=20, method="inclusive")
    return Timing(
        runs=len(seconds), p05=parts[0], p25=parts[4], p50=parts[9], p75=parts[14], p95=parts[18]
    )


def measure(
    call: Callable[[], object],
    *,
    warm: int = 3,
    runs: int = 20,
    least_s: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Call `warm` times unmeasured, then measure at least `runs` calls and `least_s` seconds."""
    for _ in range(warm):
        call()
    seconds: list[float] = []
    while len(seconds) < max(2, runs) or sum(seconds) < least_s:
        begin = clock()
        call()
        seconds.append(clock() - begin)
    return summary(seconds)


def machine() -> dict[str, Any]:
    """What a CPU's figure depends on."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "versions": {name: _version(name) for name in ("torch", "nixl-cu13", "ray")},
    }


def commit() -> str:
    """The commit of the tree, with a mark when it has changes that are not in it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def record(
    name: str, case: Mapping[str, Any], timing: Timing, *, folder: Path = RESULTS
) -> dict[str, Any]:
    """Append one line to `folder/name.jsonl` and return it."""
    line = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "case": dict(case),
        "seconds": {key: float(f"{value:.4g}") for key, value in asdict(timing).items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
