"""One trace a request, from real rooms to a collector that decodes OTLP."""

from __future__ import annotations

import contextlib
from functools import partial

import httpx

from common.config import settings as cs
from common.errors import HandoffRefused, RoomLost
from tests.support.collector import Collector, collecting
from tests.support.nano import ROOT
from tests.support.pictures import solid
from tests.support.relay import Relay, with_front
from tests.support.scenes import data_uri

CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{CLIENT[0]}-{CLIENT[1]}-01"
SECRET_WORD = "xylophone"


def settings(endpoint: str, share: float = 1.0) -> cs.Settings:
    return cs.Settings(
        model=cs.ModelSettings(path=str(ROOT / "checkpoints/nano")),
        server=cs.ServerSettings(port=0, admin_port=0, drain_s=1.0),
        router=cs.RouterSettings(heartbeat_s=0.2, silent_s=5.0),
        trace=cs.TraceSettings(endpoint=endpoint, share=share),
    )


def body(**fields) -> dict[str, object]:
    asked = {"model": "nano-k3", "prompt": SECRET_WORD, "max_tokens": 8, "ignore_eos": True}
    return asked | fields


class Line:
    """A client of a router whose spans go to a collector."""

    def __init__(self, relay: Relay, http: httpx.AsyncClient, collector: Collector) -> None:
        self.relay, self.http, self.collector = relay, http, collector

    async def text(self, trace: str = "", **fields):
        headers = {"traceparent": trace} if trace else {}
        return await self.http.post("/v1/completions", json=body(**fields), headers=headers)


@contextlib.asynccontextmanager
async def line(share: float = 1.0, **counts: int):
    """The spans have arrived when the block is over: leaving sends them."""
    counts = {"prefill": 1, "decode": 1} | counts
    with collecting() as collector:
        async with with_front(settings(collector.endpoint, share), **counts) as (relay, router):
            url = f"http://127.0.0.1:{router.public.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                yield Line(relay, http, collector)


async def test_a_picture_and_a_question_are_one_trace_through_every_room():
    content = [
        {"type": "image_url", "image_url": {"url": data_uri(solid("red"))}},
        {"type": "text", "text": SECRET_WORD},
    ]
    async with line(encoder=1) as here:
        reply = await here.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": content}], "max_tokens": 8}
            | {"model": "nano-k3"},
            headers={"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "mine"},
        )
        assert reply.status_code == 200, reply.text
    seen = here.collector
    assert {span.trace for span in seen.spans} == {CLIENT[0]}
    top, journey = seen.one("POST /v1/chat/completions"), seen.one("journey")
    assert (top.parent, top.service, top.state) == (CLIENT[1], "baton-router", "vendor=1")
    assert top.attributes["http.response.status_code"] == 200
    assert journey.parent == top.id
    assert journey.attributes["baton.client_request"] == "mine"
    assert journey.attributes["gen_ai.usage.output_tokens"] == 8
    assert journey.attributes["baton.outcome"] in ("stop", "length")
    tree = {
        "wait": ("journey", "baton-router"),
        "encode": ("journey", "baton-encoder"),
        "prefill": ("journey", "baton-prefill"),
        "hand_off": ("journey", "baton-decode"),
        "decode": ("journey", "baton-decode"),
        "prepare": ("encode", "baton-encoder"),
        "encode_wait": ("encode", "baton-encoder"),
        "tower": ("encode", "baton-encoder"),
        "prefill_wait": ("prefill", "baton-prefill"),
        "compute": ("prefill", "baton-prefill"),
        "decode_wait": ("hand_off", "baton-decode"),
        "pull": ("hand_off", "baton-decode"),
        "verify": ("hand_off", "baton-decode"),
    }
    assert {s.name for s in seen.spans} == set(tree) | {top.name, "journey"}
    for name, (above, service) in tree.items():
        span, parent = seen.one(name), seen.one(above)
        assert (span.parent, span.service) == (parent.id, service), name
        assert parent.start <= span.start + 2000 and span.end <= parent.end + 2000, name
    assert top.start <= journey.start and journey.end <= top.end
    starts = [seen.one(name).start for name in ("wait", "encode", "prefill", "hand_off", "decode")]
    assert starts == sorted(starts)
    for name in ("tower", "compute", "pull", "verify"):
        assert seen.one(name).end > seen.one(name).start, name
    rooms = {"encode": here.relay.encoders, "prefill": here.relay.prefills}
    for name, (room,) in rooms.items():
        assert seen.one(name).attributes["baton.replica"] == room.room.id
    assert "first_token" in journey.events
    assert not any(span.is_error for span in seen.spans)
    assert SECRET_WORD.encode() not in b"".join(seen.raw)


async def test_what_was_made_again_is_an_event_and_what_failed_has_an_error():
    async with line(prefill=1, decode=2) as here:
        relay = here.relay
        real = [decode.receiver.verify for decode in relay.decodes]
        refusals = []

        def refuse_once(verify, signed, measure) -> None:
            if not refusals:
                refusals.append(len(signed))
                raise HandoffRefused("digest:state:0", "arranged")
            verify(signed, measure)

        for decode, verify in zip(relay.decodes, real, strict=True):
            decode.receiver.verify = partial(refuse_once, verify)
        assert (await here.text()).status_code == 200
        for decode, verify in zip(relay.decodes, real, strict=True):
            decode.receiver.verify = verify

        async with here.http.stream(
            "POST", "/v1/completions", json=body(stream=True, max_tokens=60)
        ) as reply:
            async for _ in reply.aiter_lines():
                busy = [d for d in relay.decodes if d.engine.helds()]
                if busy and len(relay.house.board.present("decode")) == 2:
                    busy[0].room.hang_up(RoomLost("arranged"))
        (dead,) = [d for d in relay.decodes if d.room.ended.is_set()]

        (prefill,) = relay.prefills
        forward = prefill.engine._forward
        prefill.engine._forward = lambda chosen: forward(chosen) * float("nan")
        failed = await here.text()
        assert failed.status_code == 500
    first, second, third = here.collector.named("journey")
    assert first.events["reprefill"]["error.type"] == "handoff_refused"
    assert first.events["reprefill"]["baton.room"] == "decode"
    assert second.events["replay"]["baton.replica"] == dead.room.id
    assert second.events["replay"]["error.type"] == "room_lost"
    ways = [span for span in here.collector.spans if span.parent == first.id]
    assert [(s.name, s.is_error) for s in sorted(ways, key=lambda s: s.start)] == [
        ("wait", False),
        ("prefill", False),
        ("hand_off", True),
        ("wait", False),
        ("prefill", False),
        ("hand_off", False),
        ("decode", False),
    ]
    assert not first.is_error and not second.is_error
    assert third.is_error and third.attributes["error.type"] == "non_finite"
    (failing,) = [s for s in here.collector.named("prefill") if s.parent == third.id]
    (call,) = [s for s in here.collector.named("POST /v1/completions") if s.id == third.parent]
    assert failing.is_error and call.is_error
    assert len({span.trace for span in here.collector.spans}) == 3


async def test_a_clients_choice_is_followed_and_the_share_is_of_the_others():
    async with line(share=0.0) as here:
        await here.text(trace=f"00-{CLIENT[0]}-{CLIENT[1]}-00")  # not sampled by its client
        await here.text()  # not sampled here
        await here.text(trace=PARENT)
        await here.text(trace="00-" + "0" * 32 + f"-{CLIENT[1]}-01")  # as if it were not there
        assert (await here.http.get("/v1/secretive")).status_code == 404
        assert (await here.http.get("/health")).status_code == 200
    assert {span.trace for span in here.collector.spans} == {CLIENT[0]}
    assert len(here.collector.named("journey")) == 1


async def test_paths_that_do_not_exist_are_not_named():
    async with line() as here:
        assert (await here.http.get(f"/v1/{SECRET_WORD}")).status_code == 404
        assert (await here.http.get("/health")).status_code == 200
        assert (await here.http.get("/v1/models")).status_code == 200
    assert {span.name for span in here.collector.spans} == {"GET", "GET /v1/models"}
    assert SECRET_WORD.encode() not in b"".join(here.collector.raw)
