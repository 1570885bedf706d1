"""After many requests, a third of them given up at random moments, no room holds anything."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

from tests.support.golden import NANO_EVAL
from tests.support.scenes import as_sent

REQUESTS = 200
AT_ONCE = 12
CANCELLED = 3  # every third
LONGEST_S = 0.5  # a request is given up at a moment up to here
KEYS = ("pages", "slots", "quarantine", "embeddings", "tickets")


async def test_two_hundred_requests_and_cancels_leave_nothing(server):
    cases = [json.loads(line) for line in NANO_EVAL.read_text().splitlines()]
    rng = random.Random(7)
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def one(number: int) -> int | None:
            body = request(server.model, rng.choice(cases), number, rng)
            patience = rng.uniform(0, LONGEST_S) if number % CANCELLED == 0 else 60.0
            async with gate:
                try:
                    async with asyncio.timeout(patience):
                        return await send(client, body)
                except TimeoutError:
                    return None

        statuses = await asyncio.gather(*[one(number) for number in range(REQUESTS)])
        assert set(statuses) <= {200, None}
        assert statuses.count(200) >= REQUESTS * 2 // 3 - 1
        until = asyncio.get_running_loop().time() + 10
        while held := await holdings(server):
            assert asyncio.get_running_loop().time() < until, f"still held after 10 s: {held}"
            await asyncio.sleep(0.1)


def request(model: str, case: dict[str, Any], number: int, rng: random.Random) -> dict[str, Any]:
    return {
        "model": model,
        "messages": as_sent(case["messages"]),
        "max_tokens": rng.choice([1, 5, 40]),
        "temperature": rng.choice([0, 1]),
        "seed": number,
        "n": rng.choice([1, 1, 3]),
        "stream": number % 2 == 0,
    }


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> int:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        text = (await response.aread()).decode()
        if body["stream"]:
            assert text.rstrip().endswith("data: [DONE]")
        return response.status_code


async def holdings(server) -> list[dict[str, Any]]:
    async with httpx.AsyncClient() as client:
        inventory = (await client.get(f"{server.admin_url}/admin/inventory")).json()
    assert not inventory["silent"]
    return [replica for replica in inventory["replicas"] if any(replica[key] for key in KEYS)]
