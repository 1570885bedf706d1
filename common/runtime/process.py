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

from common.config.loading import load_settings, room_secret
from common.config.settings import Settings
from common.observe.logs import start_logging
from common.runtime.drain import Served, drain


def main(build: Callable[[Settings, str, str], Served], argv: list[str] | None = None) -> None:
    """Run `python -m services.<room> SETTINGS [--replica ID]`; the secret is in BATON_SECRET.

    Prints one JSON line with room, id, host and port when it listens. At SIGTERM or SIGINT, and
    when its quarantine stays full, it drains, for `server.drain_s` at most; a signal then ends it
    at once. Exits with 1 when its engine failed or its quarantine was full: start it anew.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--replica", default="")
    parser.add_argument("--host", default="127.0.0.1")
    args = parser.parse_args(argv)
    settings = load_settings(args.settings)
    room = build(settings, room_secret(), args.replica)
    start_logging(room.room.name, room.room.id)
    sys.exit(asyncio.run(serve(room, args.host, settings.server.drain_s)))


async def serve(room: Served, host: str, drain_s: float) -> int:
    """Open, print where, and leave when told to or when there is no going on; the exit status."""
    endpoint = await room.open(host)
    told: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.put_nowait, "leave")
    place = {key: getattr(endpoint, key) for key in ("room", "id", "epoch", "host", "port")}
    sys.stdout.write(json.dumps(place) + "\n")
    sys.stdout.flush()
    ended = loop.create_task(room.room.ended.wait())
    spent = loop.create_task(room.room.spent.wait())
    leave = loop.create_task(told.get())
    await asyncio.wait({ended, spent, leave}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        again = loop.create_task(told.get()) if leave.done() else leave
        leaving = loop.create_task(drain(room, drain_s))
        await asyncio.wait({again, leaving}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        leaving.cancel()
    failed = room.room.ended.is_set() or room.room.spent.is_set()
    for task in (ended, spent, leave):
        task.cancel()
    await room.close()
    return int(failed)
