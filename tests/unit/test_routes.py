"""The front door over real HTTP, in front of rooms that only speak the contract.

Longer than 300 lines because it goes through the front door, promise by promise.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import io
import json
import random
import socket
from pathlib import Path

import httpx
import pytest
from PIL import Image

from common.config import settings as cs
from common.contract import messages as m
from common.errors import (
    CapacityError,
    DeadlineExceeded,
    HandoffRefused,
    ImageRejected,
    PoisonedState,
    RoomLost,
    TransferError,
)
from router.app import Router
from router.seats import Seats, seats_of
from tests.support.rooms import SECRET, World, until

NANO = Path(__file__).parents[2] / "checkpoints" / "nano"
SETTINGS = cs.Settings(
    model=cs.ModelSettings(path=str(NANO)),
    server=cs.ServerSettings(port=0, admin_port=0, body_limit_bytes=200_000, drain_s=1.0),
    router=cs.RouterSettings(heartbeat_s=0.1, silent_s=0.5, queue_wait_s=2.0, probe_s=0.5),
    testing=cs.TestingSettings(scripted=True),
)


@dataclasses.dataclass
class Site:
    world: World
    router: Router
    http: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def chat(self, **fields) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body(**fields))

    async def stream(self, **fields) -> list[str]:
        """Data of all events of a streamed chat."""
        text = (await self.chat(stream=True, **fields)).text
        return [line[6:] for line in text.split("\n") if line.startswith("data: ")]

    async def nothing_left(self) -> None:
        await until(lambda: self.world.held() == {}, 1.5)


def body(**fields) -> dict:
    return {
        "model": "nano-k3",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "baton_script": "I think.<|close|>think<|sep|><|open|>response<|sep|>Hello, world."
        "<|close|>response<|sep|><|close|>message<|sep|>",
    } | fields


@contextlib.asynccontextmanager
async def site(settings: cs.Settings = SETTINGS, ready: bool = True, **counts: int):
    world = World(**counts)
    await world.open()
    seats = Seats()
    seats.fill("line", seats_of(world.addresses()))
    router = Router(settings, seats, secret=SECRET, name="r1")
    await router.start()
    url = "http://127.0.0.1:{}".format
    async with (
        httpx.AsyncClient(base_url=url(router.public.port), timeout=10) as http,
        httpx.AsyncClient(base_url=url(router.admin.port), timeout=10) as admin,
    ):
        try:
            if ready:
                await until(lambda: router.readiness.is_ready)
            yield Site(world, router, http, admin)
        finally:
            await router.stop()
            await world.close()


async def test_a_whole_reply_has_reasoning_content_and_usage():
    async with site() as here:
        reply = await here.chat()
        assert reply.status_code == 200, reply.text
        told = reply.json()
        message = told["choices"][0]["message"]
        assert message["content"] == "Hello, world."
        assert message["reasoning_content"] == "I think."
        assert told["choices"][0]["finish_reason"] == "stop"
        used = told["usage"]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        await here.nothing_left()


async def test_a_stream_says_the_same_as_the_whole_reply():
    async with site() as here:
        events = await here.stream(stream_options={"include_usage": True})
        whole = (await here.chat()).json()
    assert events[-1] == "[DONE]"
    chunks = [json.loads(text) for text in events[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "Hello, world."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I think."
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({c["id"] for c in chunks}) == 1


async def test_the_role_goes_out_before_any_token_exists():
    async with site() as here:
        gate = here.world["p1"].gate(m.PrefillJob)
        request = here.http.build_request("POST", "/v1/chat/completions", json=body(stream=True))
        reply = await here.http.send(request, stream=True)
        first = await anext(reply.aiter_lines())
        assert json.loads(first[6:])["choices"][0]["delta"]["role"] == "assistant"
        gate.set()
        await reply.aclose()


def with_a_picture() -> dict:
    """A message with a picture of 2 tokens."""
    picture = io.BytesIO()
    Image.new("RGB", (56, 28)).save(picture, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "what?"}]
    return {"role": "user", "content": content}


async def test_a_picture_goes_through_the_encoder_by_reference():
    async with site() as here:
        for _ in range(2):
            reply = await here.chat(messages=[with_a_picture()])
            assert reply.status_code == 200
        jobs = [x for x in here.world["e1"].seen if isinstance(x, m.EncodeJob)]
        assert [bool(job.payloads[0]) for job in jobs] == [False, True, False]
        assert jobs[0].images[0].width == 56
        prefill = here.world["p1"].last(m.PrefillJob)
        assert len(prefill.image_offsets) == 1
        assert reply.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"", 400, "empty"),
        (json.dumps(body(messages=[])).encode(), 400, "messages"),
        (json.dumps(body(temperature=9)).encode(), 400, "temperature"),
        (json.dumps(body(model="other")).encode(), 404, "other"),
        (b"x" * 200_001, 413, "200000"),
        (
            json.dumps(body(messages=[{"role": "user", "content": "word " * 30_000}])).encode(),
            400,
            "context",
        ),
    ],
    ids=["broken", "empty", "no messages", "range", "model", "body", "context"],
)
async def test_bad_input_gets_a_sentence_and_reaches_no_room(content, status, word):
    async with site() as here:
        here.world["p1"].seen.clear()
        here.router.readiness._due_at = lambda pair: float("inf")  # no probes from here on
        reply = await here.http.post("/v1/chat/completions", content=content)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert word in error["message"]
        assert (await here.chat()).status_code == 200
        assert here.world["p1"].names().count("PrefillJob") == 1


async def test_a_picture_that_turns_out_to_be_damaged_is_named():
    good = io.BytesIO()
    Image.new("RGB", (28, 28)).save(good, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(good.getvalue()).decode()
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": uri}}]
    async with site() as here:
        refused = ImageRejected("the PNG image is cut short", param="images[0]")
        here.world["e1"].plant(m.EncodeJob, refused)
        reply = await here.chat(messages=[{"role": "user", "content": content}])
        await here.nothing_left()
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "invalid_image"
    assert error["param"] == "messages[0].content[1].image_url"


async def test_a_body_without_a_length_is_read_no_further_than_the_limit():
    async def endless():
        for _ in range(40):
            yield b"x" * 10_000

    async with site() as here:
        reply = await here.http.post("/v1/chat/completions", content=endless())
        assert reply.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/metrics", 404),
        ("GET", "/admin/inventory", 404),
    ],
)
async def test_unknown_paths_and_methods_are_told_in_the_same_form(method, path, status):
    async with site() as here:
        reply = await here.http.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["message"]


async def test_an_asked_for_upgrade_is_ignored():
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with site() as here:
        reply = await here.http.get("/v1/models", headers=upgrade)
        assert reply.status_code == 200


async def test_models_lists_what_is_served():
    async with site() as here:
        told = (await here.http.get("/v1/models")).json()
        assert [row["id"] for row in told["data"]] == ["nano-k3"]
        one = await here.http.get("/v1/models/nano-k3")
        assert one.json() == told["data"][0]
        other = await here.http.get("/v1/models/nano/k3")
        assert other.status_code == 404
        assert other.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("origins", [(), ("https://a.example",)])
async def test_pages_of_named_origins_alone_may_ask_from_a_browser(origins):
    server = dataclasses.replace(SETTINGS.server, cors_origins=origins)
    keys = (f"ann:{hashlib.sha256(b'k-ann').hexdigest()}",)
    access = cs.AccessSettings(keys=keys)
    async with site(dataclasses.replace(SETTINGS, server=server, access=access)) as here:
        for origin in ("https://a.example", "https://b.example"):
            asked = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            }
            before = await here.http.options("/v1/chat/completions", headers=asked)
            known = {"Origin": origin, "Authorization": "Bearer k-ann"}
            reply = await here.http.get("/v1/models", headers=known)
            refused = await here.http.get("/v1/models", headers={"Origin": origin})
            assert (reply.status_code, refused.status_code) == (200, 401)
            allowed = origin if origin in origins else None
            for one in (before, reply, refused):
                assert one.headers.get("access-control-allow-origin") == allowed
            assert (before.status_code == 200) == (allowed is not None)


async def test_until_a_pair_has_passed_its_probe_it_is_not_ready():
    async with site(ready=False, prefill=1) as here:
        assert (await here.http.get("/health")).status_code == 200
        reply = await here.http.get("/ready")
        assert reply.status_code == 503
        assert "Retry-After" in reply.headers
        assert (await here.chat()).status_code == 503


async def test_who_asks_as_of_serves_proxy_hears_success_when_it_is_ready_and_needs_no_key():
    access = cs.AccessSettings(keys=("me:" + "0" * 64,))
    async with site(dataclasses.replace(SETTINGS, access=access)) as here:
        reply = await here.http.get("/-/healthz")
        assert (reply.status_code, reply.text) == (200, "success")
        here.router.readiness.is_draining = True
        assert (await here.http.get("/-/healthz")).status_code == 503
    async with site(ready=False, prefill=1) as here:
        assert (await here.http.get("/-/healthz")).status_code == 503


async def test_readiness_falls_back_when_a_room_dies_and_returns_in_a_new_epoch():
    async with site() as here:
        assert (await here.http.get("/ready")).status_code == 200
        await here.world["d1"].die()
        await until(lambda: not here.router.readiness.is_ready)
        assert (await here.http.get("/ready")).status_code == 503
        await here.world["d1"].rise()
        await until(lambda: here.router.readiness.is_ready)


async def test_a_pair_that_answers_otherwise_is_taken_out_of_service():
    async with site(prefill=2, decode=1) as here:
        pairs, house = here.router.house.pairs, here.router.house
        await until(
            lambda: pairs.count_usable(house.seen("prefill")[0], house.seen("decode")[0]) == 2
        )
        honest = here.world.answer
        here.world.answer = lambda prompt, c, i: honest(prompt, c, i) + 1
        await until(lambda: not here.router.readiness.is_ready)
        here.world.answer = honest
        await until(lambda: here.router.readiness.is_ready, 6.0)


@pytest.mark.parametrize(
    ("answer", "differs"),
    [
        (HandoffRefused("lease", "5.0 s are left"), False),
        (HandoffRefused("reservation", "it is not held any more"), False),
        (HandoffRefused("epoch", "its producer was started anew"), False),
        (HandoffRefused("nonce", "it was taken before"), False),
        (DeadlineExceeded("a READ took over 10.0 s"), False),
        (TransferError("the READ broke"), False),
        (RoomLost("the owner does not answer"), False),
        (CapacityError("no room"), False),
        (HandoffRefused("canary", "logits differ by 0.3"), True),
        (HandoffRefused("digest:state:2", "not what was signed"), True),
        (HandoffRefused("span:latent", "missing"), True),
        (PoisonedState("a logit is not finite"), True),
    ],
    ids=lambda value: getattr(value, "part", type(value).__name__),
)
async def test_only_a_difference_takes_a_pair_out_of_service(answer, differs):
    async with site(prefill=1, decode=1) as here:
        house = here.router.house
        (prefill,), (decode,) = house.seen("prefill")[0], house.seen("decode")[0]
        here.world["d1"].plant(m.DecodeJob, answer)
        before = probes(house)
        await until(lambda: probes(house) > before, 5.0)
        assert house.pairs.usable(prefill, decode) is not differs


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_share_of_requests_has_its_last_token_computed_twice(share):
    settings = dataclasses.replace(
        SETTINGS, router=dataclasses.replace(SETTINGS.router, canary_share=share)
    )
    async with site(settings) as here:
        for _ in range(5):
            assert (await here.chat()).status_code == 200
        asked = [x for x in here.world["d1"].seen if isinstance(x, m.Reserve) and not x.probe]
        assert [x.canary for x in asked] == [share == 1.0] * 5


def probes(house) -> float:
    """Probes that ended, other than well."""
    told = house.tally.snapshot()
    return sum(v for k, v in told.items() if "probes_total" in k and "passed" not in k)


@pytest.mark.parametrize(
    ("error", "times", "status", "code"),
    [
        (HandoffRefused("digest:latent:0", "no"), 2, 503, "handoff_refused"),
        (PoisonedState("a logit is not finite"), 1, 500, "non_finite"),
    ],
)
async def test_a_fault_inside_is_told_without_its_particulars(error, times, status, code):
    async with site() as here:
        here.router.readiness._due_at = lambda pair: float("inf")
        await asyncio.sleep(0.1)
        here.world["d1"].plant(m.DecodeJob, *[error] * times)
        reply = await here.chat()
        assert reply.status_code == status
        assert reply.json()["error"]["code"] == code
        assert "digest" not in reply.text
        assert (await here.chat()).status_code == 200
        await here.nothing_left()


async def test_full_queues_are_told_at_once_with_a_time_to_come_back():
    settings = dataclasses.replace(
        SETTINGS, router=dataclasses.replace(SETTINGS.router, queue_limit=1)
    )
    async with site(settings) as here:
        here.world["d1"].slots = 0
        waiting = asyncio.create_task(here.chat())
        await until(lambda: len(here.router.house.admission) == 1)
        for stream in (False, True):
            reply = await here.chat(stream=stream)
            assert reply.status_code == 429
            assert int(reply.headers["Retry-After"]) >= 1
        here.world["d1"].slots = 8
        assert (await waiting).status_code == 200


async def test_a_refusal_of_a_room_before_admission_is_a_status_in_a_stream_too():
    async with site() as here:
        here.world["d1"].plant(m.Reserve, CapacityError("full"), CapacityError("full"))
        reply = await here.chat(stream=True)
        assert reply.status_code == 200


@pytest.mark.parametrize(("replica", "kind"), [("e1", m.EncodeJob), ("p1", m.PrefillJob)])
async def test_a_room_whose_queue_is_full_is_told_once_with_a_time_to_come_back(replica, kind):
    async with site() as here:
        here.router.readiness._due_at = lambda pair: float("inf")
        await asyncio.sleep(0.1)
        for stream in (False, True):
            asked = here.world[replica].names().count(kind.__name__)
            here.world[replica].plant(kind, CapacityError("too many requests wait here"))
            reply = await here.chat(stream=stream, messages=[with_a_picture()])
            assert here.world[replica].names().count(kind.__name__) == asked + 1
            assert "at_capacity" in reply.text and "[DONE]" not in reply.text
            if not stream:  # a stream has begun: a seat in decode was free
                assert reply.status_code == 429
                assert int(reply.headers["Retry-After"]) >= 1
            await here.nothing_left()
        assert "baton_replays_total" not in str(here.router.house.tally.snapshot())


async def test_an_error_in_mid_stream_is_an_event_and_not_done():
    async with site() as here:
        here.world["d1"].pause_after = 3
        request = here.http.build_request("POST", "/v1/chat/completions", json=body(stream=True))
        reply = await here.http.send(request, stream=True)
        await until(lambda: any(not k.startswith("probe") for k in here.world["d1"].tasks))
        (name,) = [k for k in here.world["d1"].tasks if not k.startswith("probe")]
        await asyncio.sleep(0.05)
        broken = m.TokenItem(request=name, choice=0, finish="error", error="not finite")
        for wire in here.world["d1"].listening.wires:
            wire.push(m.TokenFrame(step=9, items=(broken,)))
        text = (await reply.aread()).decode()
        assert '"error"' in text.strip().split("\n")[-1]
        assert "[DONE]" not in text
        await here.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_every_room_within_a_second(stream):
    async with site() as here:
        here.router.readiness._due_at = lambda pair: float("inf")
        here.world["d1"].pause_after = 4
        sending = asyncio.create_task(here.chat(stream=stream))
        await until(lambda: bool(here.world["d1"].tasks))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: here.world.held() == {}, 1.0)
        await until(lambda: here.router.house.running == 0)


async def test_a_quiet_stream_gets_comments():
    settings = dataclasses.replace(
        SETTINGS, server=dataclasses.replace(SETTINGS.server, keep_alive_s=0.1)
    )
    async with site(settings) as here:
        gate = here.world["p1"].gate(m.PrefillJob)
        sending = asyncio.create_task(here.chat(stream=True))
        await asyncio.sleep(0.5)
        gate.set()
        text = (await sending).text
        assert text.count(": keep-alive\n\n") >= 2
        assert text.endswith("data: [DONE]\n\n")


async def test_a_request_id_is_repeated_when_it_is_plain_and_never_reaches_a_room():
    async with site() as here:
        two = await asyncio.gather(
            *(
                here.http.post(
                    "/v1/chat/completions", json=body(), headers={"X-Request-Id": "same-id"}
                )
                for _ in range(2)
            )
        )
        assert [reply.headers["x-request-id"] for reply in two] == ["same-id"] * 2
        assert two[0].json()["id"] != two[1].json()["id"]
        odd = await here.http.get("/health", headers={"X-Request-Id": "a b"})
        assert odd.headers["x-request-id"].startswith("req-")
        assert "same-id" not in here.world["p1"].last(m.PrefillJob).request


async def test_with_keys_in_the_settings_only_their_owners_may_ask():
    settings = dataclasses.replace(
        SETTINGS,
        access=cs.AccessSettings(
            keys=(f"ann:{hashlib.sha256(b'k-ann').hexdigest()}",), requests_per_minute=2
        ),
    )
    async with site(settings) as here:
        nobody = await here.chat()
        assert nobody.status_code == 401
        assert nobody.headers["www-authenticate"] == "Bearer"
        assert (await here.http.get("/v1/models")).status_code == 401
        assert (await here.http.get("/ready")).status_code == 200
        here.http.headers["Authorization"] = "Bearer k-ann"
        for _ in range(2):
            assert (await here.chat()).status_code == 200
        jobs = [x for x in here.world["p1"].seen if isinstance(x, m.PrefillJob)]
        assert {len(x.salt) for x in jobs if not x.probe} == {16}
        late = await here.chat()
        assert late.status_code == 429
        assert 1 <= int(late.headers["Retry-After"]) <= 30
        assert "k-ann" not in late.text


async def test_nothing_is_said_of_other_origins():
    async with site() as here:
        reply = await here.http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
        assert not [name for name in reply.headers if name.startswith("access-control")]
        asked = await here.http.options("/v1/chat/completions", headers={"Origin": "https://x.y"})
        assert asked.status_code == 405


async def test_a_fault_of_the_router_itself_is_a_plain_500(monkeypatch):
    async with site() as here:

        async def broken(*_):
            raise RuntimeError("secret particulars")

        monkeypatch.setattr(here.router.desk, "order_chat", broken)
        reply = await here.chat()
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "secret" not in reply.text and "RuntimeError" not in reply.text


async def test_only_a_well_formed_trace_is_passed_on():
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with site() as here:
        for sent, passed in ((trace, trace), ("anything else", "")):
            here.http.headers["traceparent"] = sent
            await here.chat()
            jobs = [x for x in here.world["p1"].seen if isinstance(x, m.PrefillJob)]
            assert [x.trace for x in jobs if not x.probe][-1] == passed


async def test_headers_over_the_limit_are_refused():
    async with site() as here:
        reply = await here.http.get("/health", headers={"X-Long": "a" * 33_000})
        assert reply.status_code == 431
        assert reply.json()["error"]["message"]


async def test_a_stop_string_ends_the_rooms_work_and_counts_as_a_stop():
    async with site() as here:
        here.world["d1"].pause_after = 60
        script = "<|close|>think<|sep|><|open|>response<|sep|>Hello, " + "and " * 100
        reply = await here.chat(stop=[","], baton_script=script, max_tokens=200)
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
        await here.nothing_left()
        text = (await here.admin.get("/metrics")).text
        assert 'outcome="stop"} 1' in text and 'outcome="cancelled"' not in text


async def test_a_finished_request_leaves_nothing_to_cancel():
    async with site() as here:
        for stream in (True, False):
            assert (await here.chat(stream=stream)).status_code == 200
        await until(lambda: here.router.house.running == 0)
        assert not [n for n, room in here.world.rooms.items() if "Cancel" in room.names()]


async def test_ignored_fields_are_named_in_a_header():
    async with site() as here:
        reply = await here.chat(no_such_field=1)
        assert reply.headers["x-baton-ignored"] == "no_such_field"


async def test_the_inventory_lists_every_replica_and_who_is_silent():
    async with site(encoder=1, prefill=1, decode=2) as here:
        await until(lambda: len(here.router.house.board.connected()) == 4)
        await here.world["d2"].die()
        await until(lambda: here.router.house.board.silent() == ["d2"])
        told = (await here.admin.get("/admin/inventory")).json()
        assert [row["id"] for row in told["replicas"]] == ["d1", "e1", "p1"]
        assert set(told["replicas"][0]) == {
            "room",
            "id",
            "epoch",
            "pages",
            "slots",
            "quarantine",
            "embeddings",
            "tickets",
            "cached",
        }
        assert set(told["replicas"][0]["cached"]) == {"pages", "slots", "embeddings"}
        assert told["silent"] == ["d2"]


async def test_metrics_carry_room_and_replica():
    async with site() as here:
        await here.chat()
        text = (await here.admin.get("/metrics")).text
        lines = text.splitlines()
        assert 'baton_requests_total{room="router",replica="r1",outcome="stop"} 1' in lines
        assert 'baton_resident_bytes{room="decode",replica="d1"} 1' in lines
        assert 'baton_ready{room="router",replica="r1"} 1' in lines
        assert 'baton_free_slots{room="decode",replica="d1"} 8' in lines


async def test_stopping_lets_a_running_stream_end():
    async with site() as here:
        gate = here.world["p1"].gate(m.PrefillJob)
        sending = asyncio.create_task(here.chat(stream=True))
        await until(lambda: here.router.house.running == 1)
        stopping = asyncio.create_task(here.router.stop())
        await asyncio.sleep(0.1)
        gate.set()
        assert (await sending).text.endswith("data: [DONE]\n\n")
        await stopping


async def test_a_stream_longer_than_the_drain_time_ends_with_an_error_and_not_done():
    async with site() as here:
        here.world["d1"].pause_after = 2
        sending = asyncio.create_task(here.stream())
        await until(lambda: here.router.house.running == 1)
        await here.router.stop()
        events = await sending
        error = json.loads(events[-1])["error"]
        assert error["code"] == "not_ready" and "stops" in error["message"]
        assert "[DONE]" not in "".join(events)
        await here.nothing_left()


async def test_small_replies_leave_at_once():
    async with site(ready=False, decode=1) as here:
        for listener in (here.router.public, here.router.admin):
            (server,) = listener._server.servers
            # asyncio turns TCP_NODELAY on for connections of sockets that name their protocol
            assert {s.proto for s in server.sockets} == {socket.IPPROTO_TCP}


async def test_after_many_requests_a_third_of_them_left_nothing_is_held_anywhere():
    draw = random.Random(5)
    settings = dataclasses.replace(
        SETTINGS, router=dataclasses.replace(SETTINGS.router, queue_wait_s=20.0)
    )
    async with site(settings, encoder=1, prefill=2, decode=2) as here:
        here.world.step_s = 0.001

        async def one(leaves_after_s: float | None) -> int:
            asking = here.chat(stream=draw.random() < 0.5, n=draw.choice((1, 1, 3)))
            if leaves_after_s is None:
                return (await asking).status_code
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                await asyncio.wait_for(asking, leaves_after_s)
            return 0

        leave = [draw.uniform(0, 0.2) if draw.random() < 0.34 else None for _ in range(120)]
        stay = await asyncio.gather(*map(one, leave))
        assert set(stay) == {0, 200}
        house = here.router.house
        await until(lambda: house.running == 0)
        await here.nothing_left()
        await until(lambda: all(r.is_idle for r in house.board.connected()))
        assert house.leases._held == {}
        assert len(house.admission) == 0
