"""LocalRanks: the ranks of a replica as processes of its leader's host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress

import torch

from common.config.loading import as_tables
from common.config.settings import Settings


class LocalRanks:
    """Starts them; they end when their leader hangs up."""

    def __init__(self, settings: Settings, room: str, secret: str) -> None:
        """Remember what to start them with."""
        self._tables = as_tables(settings)
        self._room, self._secret = room, secret
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, host: str, port: int) -> None:
        """Start one; it reads the settings from its standard input.

        Where the leader has the first of several devices, rank r takes device r, from the first
        again when there are fewer.
        """
        tables = self._tables
        if tables["model"]["device"] in ("cuda", "cuda:0") and torch.cuda.device_count() > 1:
            device = f"cuda:{rank % torch.cuda.device_count()}"
            tables = tables | {"model": tables["model"] | {"device": device}}
        process = subprocess.Popen(
            [sys.executable, "-m", "common.runtime.rank", self._room, str(rank), f"{host}:{port}"],
            env=os.environ | {"BATON_SECRET": self._secret},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already; `ended` will tell
            process.stdin.write(json.dumps(tables).encode())
            process.stdin.close()
        self.processes.append(process)

    def ended(self) -> list[int]:
        """See `Starter`."""
        return [rank for rank, one in enumerate(self.processes, 1) if one.poll() is not None]

    def close(self, within_s: float = 10.0) -> None:
        """Wait until all have ended; the leader has hung up."""
        for process in self.processes:
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
