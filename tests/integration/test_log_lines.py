"""Every room's lines name the request, and no line of any process repeats what a client sent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging

import httpx
import pytest

from common.config import settings as cs
from common.observe.logs import JsonLines
from tests.integration.test_traces import settings
from tests.support import canaries
from tests.support.relay import with_front

ROOMS = ("baton.room", "baton.engine", "baton.decode", "baton.loading", "baton.wire")
CLIENTS = ("httpx", "httpcore")  # the test's own client, in this process


@pytest.fixture
def lines():
    """All lines of all loggers, as the process that has them would write them."""
    written: list[str] = []
    handler = logging.Handler()
    router, room = JsonLines("router"), JsonLines("room")

    def emit(record: logging.LogRecord) -> None:
        if not record.name.startswith(CLIENTS):
            written.append((room if record.name in ROOMS else router).format(record))

    handler.emit = emit
    root, ours = logging.getLogger(), logging.getLogger("baton")
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    ours.setLevel(before)


async def test_lines_name_the_request_in_every_room_and_never_repeat_what_was_sent(lines):
    digest = hashlib.sha256(canaries.KEY.encode()).hexdigest()
    keyed = dataclasses.replace(settings(""), access=cs.AccessSettings(keys=(f"me:{digest}",)))
    async with with_front(keyed, encoder=1, prefill=1, decode=1) as (_, router):
        url = f"http://127.0.0.1:{router.public.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            statuses, ids = [], []
            for path, body in canaries.requests("nano-k3"):
                reply = await http.post(path, json=body, headers=canaries.HEADERS)
                statuses.append(reply.status_code)
                ids.append(reply.headers["x-request-id"])
            bad = {"Authorization": f"Bearer {canaries.KEY}x", "X-Request-Id": canaries.KEY + "/"}
            assert (await http.get("/v1/models", headers=bad)).status_code == 401
            raw = await http.post(
                "/v1/chat/completions",
                content=b'{"' + canaries.WORD.encode(),
                headers=canaries.HEADERS,
            )
            assert raw.status_code == 400
    assert statuses[:4] == [200, 200, 200, 200], statuses
    assert statuses[9:] == [*[400] * 6, 404, 200, 404]
    told = [json.loads(line) for line in lines]
    assert len(told) > 30
    for forbidden in (*canaries.FORBIDDEN, digest):
        assert [line for line in lines if forbidden in line] == []
    jobs = [line for line in told if line["event"] == "job ended"]
    of_first = [line for line in jobs if line["request"] == ids[0]]
    assert [(line["job"], line["outcome"]) for line in of_first] == [
        ("Reserve", "Reservation"),
        ("EncodeJob", "ImagesMissing"),
        ("EncodeJob", "EmbedTicket"),
        ("PrefillJob", "CacheTicket"),
        ("DecodeJob", "Accepted"),
    ]
    assert {line.get("trace") for line in of_first[1:]} == {canaries.TRACE}
    (ended,) = [x for x in told if x["event"] == "request ended" and x["request"] == ids[0]]
    assert ended["trace"] == canaries.TRACE and ended["pull_s"] > 0
    assert {line["request"] for line in jobs if line["request"].startswith(ids[2])} == {
        f"{ids[2]}-0",
        f"{ids[2]}-1",
    }
