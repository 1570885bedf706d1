"""`baton serve` as a process of its own, with settings of the test's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, write_settings


@dataclass(frozen=True)
class Serving:
    """Where it listens, and its process, which leads a group of its own."""

    url: str
    admin_url: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(
    folder: Path, tables: dict[str, dict[str, Any]], env: dict[str, str] | None = None
) -> Iterator[Serving]:
    """Start it, wait until it is ready, stop it; `env` is added to its environment."""
    port, admin = free_port(), free_port()
    server = {"port": port, "admin_port": admin} | tables.get("server", {})
    path = write_settings(folder / "settings.toml", tables | {"server": server})
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", str(path)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("PORT", "ADMIN_PORT")}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | (env or {}),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Baton serves"), f"the server did not start: {line!r}"
        yield Serving(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(90)
        process.stdout.close()
