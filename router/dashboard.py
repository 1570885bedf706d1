"""The page an operator looks at: `/dashboard`, and the events that keep it alive.

One static file and one stream of server-sent events, a snapshot a second. It shows what this router
sees: counts, ages and times, never a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.house import House
from router.readiness import Readiness
from router.replica import Replica

PAGE = Path(__file__).parent / "dashboard.html"
EVERY_S = 1.0
SHOWN = 20  # requests
STAGES = ("encoder", "prefill", "decode")


class Dashboard:
    """The page's routes."""

    def __init__(self, house: House, readiness: Readiness) -> None:
        """What is shown."""
        self._house, self._readiness = house, readiness
        self._page = PAGE.read_text()

    def routes(self) -> list[Route]:
        """`/dashboard`, `/dashboard/events`, `/admin/requests/ID`."""
        return [
            Route("/dashboard", self.page),
            Route("/dashboard/events", self.events),
            Route("/admin/requests/{name:path}", self.request),
        ]

    async def page(self, _: Request) -> Response:
        """The page itself, which loads nothing from elsewhere."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": f"{policy}; connect-src 'self'; img-src data:"}
        return HTMLResponse(self._page, headers=headers)

    async def events(self, _: Request) -> Response:
        """A snapshot a second, for as long as somebody looks."""
        return StreamingResponse(
            self._stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def request(self, request: Request) -> Response:
        """The last requests of one id: the reply's, the router's, the client's or the trace's."""
        recent, name = self._house.recent, request.path_params["name"]
        if not (found := recent.find(name)):
            kept, seconds = recent.span_s(time.time())
            return JSONResponse({"error": _unknown(self._house, kept, seconds)}, status_code=404)
        return JSONResponse({"requests": [past.plain() for past in found]})

    async def _stream(self) -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + json.dumps(snapshot(self._house, self._readiness)).encode() + b"\n\n"
            await asyncio.sleep(EVERY_S)


def _unknown(house: House, kept: int, seconds: float) -> str:
    """Why there may be nothing of a request's id."""
    of = f"the last {kept} that ended, which go back {seconds:.0f} s" if kept else "any so far"
    return (
        f"no request of this id is among {of}, at {house.name}; {house.running} still run, "
        "another router may have it, or it was refused before any room heard of it"
    )


def snapshot(house: House, readiness: Readiness) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    silent = house.board.silent()
    return {
        "at": time.time(),
        "router": house.name,
        "model": house.settings.model.name,
        "ready": readiness.is_ready,
        "running": house.running,
        "queued": len(house.admission),
        "oldest_s": house.admission.oldest_s,
        "queue_limit": house.settings.router.queue_limit,
        "counted": _counted(house),
        "stages": {stage: _stage(house, stage) for stage in STAGES},
        "silent": silent,
        "changes": house.decisions.changes[::-1],
        "requests": [past.plain() for past in house.recent.newest(SHOWN)],
    }


def _counted(house: House) -> dict[str, float]:
    """Counters the page makes rates of."""
    values = house.tally.snapshot()
    names = {"requests": "baton_requests_total", "good": "baton_good_requests_total"}
    names |= {"prompt": "baton_prompt_tokens_total", "answer": "baton_completion_tokens_total"}
    return {
        short: sum(value for key, value in values.items() if key.partition("{")[0] == name)
        for short, name in names.items()
    }


def _stage(house: House, stage: str) -> dict[str, Any]:
    replicas = [r for r in house.board.connected() if r.room == stage]
    decided = house.decisions.stages.get(stage, {})
    return {
        "target": decided.get("target"),
        "frozen": decided.get("frozen", False),
        "replicas": [_replica(replica) for replica in replicas],
    }


def _replica(replica: Replica) -> dict[str, Any]:
    load = replica.load
    return {
        "id": replica.id,
        "leaving": replica.is_leaving,
        "suspended": load.suspended,
        "queued": load.queued,
        "queued_tokens": load.queued_tokens,
        "running": load.running,
        "oldest_s": load.oldest_s,
        "slots": [load.total_slots - load.free_slots, load.total_slots],
        "pages": [load.total_pages - load.free_pages, load.total_pages],
        "resident_bytes": load.counters.get("baton_resident_bytes", 0.0),
    }
