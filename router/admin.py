"""What an operator reads, on the second listener: `/metrics`, `/admin/inventory`, `/dashboard`.

Knows how to ask every replica what it holds and how to write counters down. It serves no client.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from common.contract.messages import Holdings, Inventory
from common.errors import ServingError
from common.observe.metrics import render
from common.observe.process import resident_bytes
from router.dashboard import Dashboard
from router.house import House
from router.keyed import Keyed
from router.readiness import Readiness
from router.replica import Replica

ASK_S = 2.0  # a replica that does not answer within this is listed as silent
_COUNTS = ("pages", "slots", "quarantine", "embeddings", "tickets")


def admin_app(house: House, readiness: Readiness) -> ASGIApp:
    """The operator's pages, behind their own key where the settings hold one."""

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(
            metrics_text(house, readiness), media_type="text/plain; version=0.0.4"
        )

    async def inventory(_: Request) -> Response:
        return JSONResponse(await take_inventory(house))

    app = Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/admin/inventory", inventory),
            *Dashboard(house, readiness).routes(),
        ],
    )
    return Keyed(app, house.settings.access.admin)


async def take_inventory(house: House) -> dict[str, Any]:
    """What requests and leases hold in every replica, and who does not answer."""
    replicas = house.board.connected()
    answers = await asyncio.gather(*(_holdings(replica) for replica in replicas))
    silent = {r.id for r, held in zip(replicas, answers, strict=True) if held is None}
    return {
        "replicas": [_row(held) for held in answers if held is not None],
        "silent": sorted(silent | set(house.board.silent())),
    }


async def _holdings(replica: Replica) -> Holdings | None:
    try:
        reply = await replica.call(Inventory(), timeout_s=ASK_S)
    except ServingError:
        return None
    return reply if isinstance(reply, Holdings) else None


def _row(held: Holdings) -> dict[str, Any]:
    counts = {name: getattr(held, name) for name in _COUNTS}
    cached = {
        "pages": held.cached.pages,
        "slots": held.cached.slots,
        "embeddings": held.cached.embeddings,
    }
    return {"room": held.room, "id": held.id, "epoch": held.epoch, **counts, "cached": cached}


def metrics_text(house: House, readiness: Readiness) -> str:
    """The counters of this router and of every replica it hears, as Prometheus text."""
    tally = house.tally
    tally.set("baton_admission_queued", len(house.admission))
    tally.set("baton_admission_oldest_seconds", house.admission.oldest_s)
    tally.set("baton_resident_bytes", float(resident_bytes()))
    for stage in ("encoder", "prefill", "decode"):
        tally.set("baton_replicas", float(len(house.board.present(stage))), stage=stage)
    tally.set("baton_requests_running", house.running)
    tally.set("baton_pairs_ready", house.pairs_ready())
    tally.set("baton_ready", float(readiness.is_ready))
    sources: list[tuple[dict[str, str], dict[str, float]]] = [
        ({"room": "router", "replica": house.name}, tally.snapshot())
    ]
    sources += [
        ({"room": r.room, "replica": r.id}, _load(r) | r.load.counters)
        for r in house.board.connected()
    ]
    sources += [({"replica": key}, {"baton_replica_silent": 1.0}) for key in house.board.silent()]
    return render(sources)


def _load(replica: Replica) -> dict[str, float]:
    load = replica.load
    return {
        "baton_replica_silent": 0.0,
        "baton_replica_epoch": float(replica.epoch),
        "baton_queued": load.queued,
        "baton_queued_tokens": load.queued_tokens,
        "baton_running": load.running,
        "baton_free_slots": load.free_slots,
        "baton_free_pages": load.free_pages,
        "baton_total_slots": load.total_slots,
        "baton_total_pages": load.total_pages,
        "baton_oldest_seconds": load.oldest_s,
    }
