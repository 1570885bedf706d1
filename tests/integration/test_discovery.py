"""Serve's request-router interface, as far as `router/discovery.py` leans on it.

One small application on a local Ray: when a new Ray changes the interface, this fails and nothing
else does.
"""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.slow


class Room:
    """A deployment that tells an address and its own name."""

    async def record_replica_metadata(self):
        return {"host": "127.0.0.1", "port": 4242}

    async def whoami(self, pause_s: float = 0.0) -> str:
        from ray import serve

        await asyncio.sleep(pause_s)
        return serve.get_replica_context().replica_tag

    async def ping(self) -> str:
        return "pong"


class Caller:
    """Stands where the router stands."""

    def __init__(self, room) -> None:
        self.room = room

    async def seats(self) -> dict[str, int]:
        from router.seats import TABLE

        await self.room.broadcast("ping").results_async(timeout_s=10)
        return {key: seat.port for key, seat in TABLE.all().items()}

    async def pinned(self, key: str, times: int) -> list[str]:
        """Sibling calls of one request, all for the same replica."""
        handle = self.room.options(session_id=key, method_name="whoami")
        return list(await asyncio.gather(*(handle.remote(0.01) for _ in range(times))))

    async def missing(self) -> str:
        try:
            await self.room.options(session_id="nobody", method_name="ping").remote()
        except LookupError as error:
            return str(error)
        return "answered"


@pytest.fixture(scope="module")
def caller():
    ray = pytest.importorskip("ray")
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    room = serve.deployment(
        name="Room",
        num_replicas=2,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class="router.discovery.PinRouter"
        ),
    )(Room)
    front = serve.deployment(
        name="Front", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}
    )(Caller)
    serve.start(proxy_location="Disabled")
    handle = serve.run(front.bind(room.bind()), name="t", route_prefix=None)
    yield handle
    serve.shutdown()
    ray.shutdown()


def test_the_table_of_seats_fills_and_sibling_calls_reach_the_replica_they_name(caller):
    seats = caller.seats.remote().result(timeout_s=30)
    assert len(seats) == 2
    assert set(seats.values()) == {4242}
    for key in seats:
        assert set(caller.pinned.remote(key, 100).result(timeout_s=60)) == {key}


def test_a_replica_that_does_not_run_is_told_at_once(caller):
    assert "nobody is not running" in caller.missing.remote().result(timeout_s=30)
