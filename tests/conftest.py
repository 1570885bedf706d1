"""What holds for every test: seeds, one torch thread, skips by name, and one server for all."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.support.processes import ROOT, write_settings

torch.set_num_threads(1)
LINGERING = 8  # threads of this process more than after the last collection
SERVER_S = 120  # patience for Ray, four deployments and the first probe


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _transports() -> Iterator[None]:
    """A room that was told its transports told the whole process; the next test chooses anew."""
    before = os.environ.get("UCX_TLS")
    yield
    os.environ.pop("UCX_TLS", None)
    if before is not None:
        os.environ["UCX_TLS"] = before


@pytest.fixture(autouse=True, scope="session")
def _threads() -> list[int]:
    """How many threads this process had after the last collection; what was imported stays."""
    gc.collect()
    gc.freeze()
    return [len(os.listdir("/proc/self/task"))]


@pytest.fixture(autouse=True)
def _nothing_lingers(_threads: list[int]) -> Iterator[None]:
    """Rooms of this process that were closed let go of their NIXL agents when they are collected.

    Python collects a large heap seldom, and each agent's progress thread takes some hundredths of a
    core until then: a hundred of them are both cores of a small machine.
    """
    yield
    if len(os.listdir("/proc/self/task")) > _threads[0] + LINGERING:
        gc.collect()
        _threads[0] = len(os.listdir("/proc/self/task"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip by name what needs more CUDA devices than there are."""
    devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if marker in item.keywords and devices < needed:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}")
                )


@dataclass(frozen=True)
class Server:
    """A running `baton serve`."""

    url: str
    admin_url: str
    model: str
    pid: int
    allowed_host: str  # where images may be fetched from; a test may listen there


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The whole system as a user starts it: `baton serve`, Ray, two replicas of prefill and decode.

    Scripted requests are allowed, which changes nothing for others.
    """
    port, admin, images = free_port(), free_port(), f"127.0.0.1:{free_port()}"
    tables = {
        "model": {"path": str(ROOT / "checkpoints/nano")},
        "server": {"port": port, "admin_port": admin, "drain_s": 5.0},
        "images": {"allowed_hosts": [images]},
        "router": {"canary_share": 0.1},
        "prefill": {"replicas": 2},
        "decode": {"replicas": 2},
        "testing": {"scripted": True},
    }
    path = write_settings(tmp_path_factory.mktemp("server") / "settings.toml", tables)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", str(path)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("PORT", "ADMIN_PORT")}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Baton serves"), f"the server did not start: {line!r}"
        yield Server(
            url=f"http://127.0.0.1:{port}",
            admin_url=f"http://127.0.0.1:{admin}",
            model="nano-k3",
            pid=process.pid,
            allowed_host=images,
        )
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()
