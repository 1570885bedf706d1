"""A room as a plain process: open it, say where it listens, serve until told to stop.

For tests, benchmarks and machines without Ray; `services/app.py` runs the same rooms under Serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from common.config.loading import load_settings, room_secret
from common.config.settings import Settings
from common.contract.messages import Endpoint


class Served(Protocol):
    """A room that can be opened and closed."""

    async def open(self, host: str) -> Endpoint:
        """Listen on a free port."""

    async def close(self) -> None:
        """Stop."""


def main(build: Callable[[Settings, str, str], Served], argv: list[str] | None = None) -> None:
    """Run `python -m services.<room> SETTINGS [--replica ID]`; the secret is in BATON_SECRET.

    Prints one JSON line with room, id, host and port when it listens.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--replica", default="")
    parser.add_argument("--host", default="127.0.0.1")
    args = parser.parse_args(argv)
    room = build(load_settings(args.settings), room_secret(), args.replica)
    asyncio.run(_serve(room, args.host))


async def _serve(room: Served, host: str) -> None:
    endpoint = await room.open(host)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    place = {key: getattr(endpoint, key) for key in ("room", "id", "epoch", "host", "port")}
    sys.stdout.write(json.dumps(place) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await room.close()
