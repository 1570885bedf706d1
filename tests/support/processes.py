"""Rooms as real processes on loopback, from a settings dictionary; killed by id when done."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECRET = "for-tests"
START_S = 60.0


def write_settings(path: Path, tables: dict[str, dict[str, Any]]) -> Path:
    """Write tables of plain values as TOML."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass
class Process:
    """One room's process and where it listens."""

    room: str
    popen: subprocess.Popen[str]
    place: dict[str, Any] = field(default_factory=dict)

    def wait_listening(self) -> None:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.room} process ended with {self.popen.wait()}")
        self.place = json.loads(line)

    def signal(self, number: int) -> None:
        """Send a signal; a stop is waited for, since the process may still answer a READ before."""
        self.popen.send_signal(number)
        if number == signal.SIGSTOP and self.popen.poll() is None:
            os.waitpid(self.popen.pid, os.WUNTRACED)

    def end(self) -> None:
        """Ask it to stop, then make it."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.popen.send_signal(signal.SIGCONT)
                self.popen.terminate()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def start(module: str, settings: Path, *more: str, env: dict[str, str] | None = None) -> Process:
    """Start `python -m MODULE SETTINGS ...`; its first line says where it listens."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "BATON_SECRET": SECRET,
    }
    popen = subprocess.Popen(
        [sys.executable, "-m", module, str(settings), *more],
        cwd=ROOT,
        env=environment | (env or {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    return Process(room=module.rpartition(".")[2], popen=popen)


@contextlib.contextmanager
def rooms(
    settings: Path,
    *,
    encoder: int = 0,
    prefill: int = 1,
    decode: int = 1,
    env: dict[str, str] | None = None,
    decode_settings: Path | None = None,
    harm: Path | None = None,
) -> Iterator[list[Process]]:
    """So many replicas of each room, listening; all ended on the way out.

    With `harm`, the file of `tests.support.harm`, they change bytes when it says so.
    """
    wanted = ["encoder"] * encoder + ["prefill"] * prefill + ["decode"] * decode
    running = []
    for room in wanted:
        own = decode_settings if room == "decode" and decode_settings else settings
        if harm is None:
            running.append(start(f"services.{room}", own, env=env))
        else:
            told = (env or {}) | {"BATON_TEST_HARM": str(harm)}
            running.append(start("tests.support.harm", own, room, env=told))
    try:
        for process in running:
            process.wait_listening()
        yield running
    finally:
        for process in running:
            process.end()


def eventually(claim, *, within_s: float, every_s: float = 0.05):
    """The first true value of `claim()`; AssertionError when none came in time."""
    until = time.monotonic() + within_s
    while True:
        value = claim()
        if value:
            return value
        assert time.monotonic() < until, f"not within {within_s:g} s: {claim}"
        time.sleep(every_s)
