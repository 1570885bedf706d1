"""One rank of a decode replica as a process: `python -m services.decode.rank RANK HOST:PORT`.

Started by its leader, which writes the settings as JSON to its standard input; the secret is in
BATON_SECRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common.config.loading import parse_settings, room_secret
from common.runtime.rank import run_rank
from services.decode.ranks import mesh_of


def serve(tables: dict[str, Any], rank: int, host: str, port: int, secret: str) -> None:
    """Load, join the leader at `host:port`, obey until it hangs up; ends the process."""
    settings = parse_settings(tables, source="the leader's settings")
    run_rank(
        settings,
        mesh_of(settings),
        rank,
        secret=secret,
        leader=(host, port),
        slots=settings.decode.slots,
        pages=settings.decode.pages,
    )


if __name__ == "__main__":
    place, _, number = sys.argv[2].rpartition(":")
    serve(json.load(sys.stdin), int(sys.argv[1]), place, int(number), room_secret())
