"""Replicas of two releases side by side: a router comes and goes without a client noticing."""

from __future__ import annotations

import asyncio

import httpx

from router.app import Router
from router.seats import Seats, seats_of
from services import kept
from tests.support.rooms import SECRET, World
from tests.unit.test_routes import SETTINGS, site


async def test_a_new_router_listens_when_it_is_ready_and_after_a_while_in_any_case():
    for decode, ready in ((1, True), (0, False)):
        world = World(prefill=1, decode=decode)
        await world.open()
        seats = Seats()
        seats.fill("line", seats_of(world.addresses()))
        router = Router(SETTINGS, seats, secret=SECRET, name="r1")
        starting = asyncio.create_task(router.start(settle_s=20.0 if ready else 0.3))
        await asyncio.sleep(0)
        assert not router.public.is_alive
        await starting
        assert router.readiness.is_ready == ready
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.public.port}") as http:
            assert (await http.get("/ready")).status_code == (200 if ready else 503)
        await router.stop()
        await world.close()


async def test_a_leaving_router_answers_who_reaches_it_and_tells_load_balancers_to_go_away():
    async with site() as here:
        here.router.readiness.is_draining = True
        assert (await here.http.get("/ready")).status_code == 503
        assert (await here.chat()).status_code == 200


async def test_a_router_without_a_successor_refuses_who_comes_and_finishes_what_runs():
    async with site() as here:
        here.world.step_s = 0.02
        running = asyncio.create_task(here.chat(max_tokens=20))
        while not here.router.house.running:
            await asyncio.sleep(0.005)
        here.router.turn_away()
        late = await here.chat()
        assert (late.status_code, late.headers["Retry-After"]) == (503, "2")
        assert late.json()["error"]["code"] == "not_ready"
        assert (await here.http.get("/v1/models")).status_code == 503
        assert (await here.http.get("/health")).status_code == 200
        assert (await here.http.get("/ready")).status_code == 503
        assert (await running).status_code == 200


async def test_who_connected_before_a_router_left_may_still_ask():
    async with site() as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.router.public.port)
        await asyncio.sleep(0.05)  # accepted
        stopping = asyncio.create_task(here.router.stop())
        await asyncio.sleep(0.2)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await stopping


def test_every_release_on_one_cluster_has_the_same_secret(monkeypatch):
    from ray.experimental import internal_kv

    store: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        if overwrite or key not in store:
            store[key] = value

    assert kept.room_secret() != kept.room_secret()
    monkeypatch.setattr(internal_kv, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: store[key])
    first = kept.room_secret()
    assert len(first) == 64 and kept.room_secret() == first
