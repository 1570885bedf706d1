"""What `/metrics` says of real rooms: each figure follows from what was asked of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import httpx
from nixl_cu13._bindings import nixlRemoteDisconnectError
from prometheus_client import parser

from common.config import settings as cs
from common.contract.messages import Ping
from common.errors import HandoffRefused
from tests.integration.test_traces import body, settings
from tests.support.pictures import solid
from tests.support.relay import Relay, with_front
from tests.support.scenes import data_uri

ROOMS = ("router", "encoder", "prefill", "decode")


class Figures:
    """One scrape of the second listener."""

    def __init__(self, text: str) -> None:
        families = parser.text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    def of(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; 0 where there are none."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


class Place:
    """A client of real rooms, who may also look at their figures."""

    def __init__(self, relay: Relay, http: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        self.relay, self.http, self.admin = relay, http, admin

    async def ask(self, **fields) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body(**fields))

    async def figures(self) -> Figures:
        """After every engine has ended its step and every replica told its load once more."""
        relay = self.relay
        for room in (*relay.encoders, *relay.prefills, *relay.decodes):
            await asyncio.wrap_future(room.engine.loop.ask(lambda: None))
        for replica in relay.house.board.connected():
            replica.load = await replica.call(Ping())
        return Figures((await self.admin.get("/metrics")).text)


@contextlib.asynccontextmanager
async def place(encoder: int = 0, **tables) -> AsyncIterator[Place]:
    quiet = cs.RouterSettings(probe_s=600.0)  # rooms count the work of probes too
    told = dataclasses.replace(settings(""), router=quiet, **tables)
    async with (
        with_front(told, encoder=encoder, prefill=1, decode=1) as (relay, router),
        httpx.AsyncClient(base_url=at(router.public.port), timeout=60) as http,
        httpx.AsyncClient(base_url=at(router.admin.port), timeout=60) as admin,
    ):
        yield Place(relay, http, admin)


def at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def test_every_stage_tells_its_work_its_times_and_its_memory():
    shown = {"type": "image_url", "image_url": {"url": data_uri(solid("red", (56, 28)))}}
    asked = [{"role": "user", "content": [shown, {"type": "text", "text": "What is this?"}]}]
    chat = {"model": "nano-k3", "messages": asked, "max_tokens": 6}
    async with place(encoder=1) as here:
        before = await here.figures()
        used = (await here.http.post("/v1/chat/completions", json=chat)).json()["usage"]
        after = await here.figures()
    prompt, answer = used["prompt_tokens"], used["completion_tokens"]
    assert answer > 1
    more = {
        # tokens, patches and batches
        ("baton_prompt_tokens_total", ""): prompt,
        ("baton_completion_tokens_total", ""): answer,
        ("baton_images_total", "encoder"): 1,
        ("baton_encode_patches_sum", "encoder"): 8,
        ("baton_encode_seconds_count", "encoder"): 1,
        ("baton_prefill_tokens_total", "prefill"): prompt,
        ("baton_prefill_step_tokens_sum", "prefill"): prompt,
        ("baton_decode_tokens_total", "decode"): answer - 1,  # prefill samples the first
        ("baton_decode_batch_sum", "decode"): answer - 1,
        ("baton_decode_step_seconds_count", "decode"): answer - 1,
        # the hand-off's time in its three parts, and that of the embeddings
        ("baton_decode_wait_seconds_count", "decode"): 1,
        ("baton_pull_seconds_count", "decode"): 1,
        ("baton_verify_seconds_count", "prefill"): 1,
        ("baton_pull_seconds_count", "prefill"): 1,
        # leases by ending
        ("baton_tickets_total", "prefill"): 1,
        ("baton_tickets_total", "encoder"): 1,
        # times of the request, and goodput
        ("baton_first_token_seconds_count", "router"): 1,
        ("baton_next_token_seconds_count", "router"): 1,
        ("baton_admission_wait_seconds_count", "router"): 1,
        ("baton_good_requests_total", "router"): 1,
    }
    for (name, room), wanted in more.items():
        labels = {"room": room} if room else {}
        assert after.of(name, **labels) - before.of(name, **labels) == wanted, (name, room)
    assert after.of("baton_tickets_total", outcome="released") >= 2
    assert after.of("baton_verify_seconds_count", room="decode") > 0
    assert after.of("baton_pulled_bytes_total") > before.of("baton_pulled_bytes_total")
    first = after.of("baton_first_token_seconds_sum")
    parts = [
        after.of("baton_first_token_part_seconds_sum", part=part)
        for part in ("admission", "encode", "prefill_wait", "prefill")
    ]
    assert min(parts) > 0 and sum(parts) <= first
    for room in ROOMS:
        assert after.of("baton_resident_bytes", room=room) > 1 << 20, room
    for room in ("prefill", "decode"):
        assert after.of("baton_free_slots", room=room) == after.of("baton_total_slots", room=room)
        assert after.of("baton_free_pages", room=room) == after.of("baton_total_pages", room=room)
    rows = after.of("baton_total_pages", room="encoder") - after.of(
        "baton_free_pages", room="encoder"
    )
    assert rows == used["prompt_tokens_details"]["image_tokens"] == 2  # embedding memory
    assert after.of("baton_embeddings_cached") == 1 and after.of("baton_embeddings_held") == 0


async def test_an_answer_slower_than_the_objective_is_not_good():
    hurried = cs.ObjectiveSettings(first_token_s=1e-6, next_token_s=1e-6)
    async with place(objective=hurried) as here:
        assert (await here.ask()).status_code == 200
        told = await here.figures()
    assert told.of("baton_requests_total", outcome="length") == 1
    assert told.of("baton_good_requests_total") == 0


async def test_who_waits_is_counted_and_so_is_how_long():
    async with place(decode=cs.DecodeSettings(slots=2)) as here:
        long = asyncio.create_task(here.ask(max_tokens=300, n=2))
        while not here.relay.decodes[0].engine.helds():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(here.ask(max_tokens=1))
        while not len(here.relay.house.admission):
            await asyncio.sleep(0.01)
        told = await here.figures()
        assert told.of("baton_admission_queued") == 1
        assert told.of("baton_admission_oldest_seconds") > 0
        assert told.of("baton_requests_running") == 2
        assert told.of("baton_free_slots", room="decode") == 0
        assert told.of("baton_reservations_refused_total") >= 1
        assert [(await task).status_code for task in (long, waiting)] == [200, 200]
        after = await here.figures()
        assert after.of("baton_admission_queued") == 0
        assert after.of("baton_admission_wait_seconds_sum") > 0


async def test_what_fails_on_the_way_is_counted_by_its_reason(monkeypatch):
    async with place() as here:
        (decode,) = here.relay.decodes

        def refuse(*_: object) -> None:
            raise HandoffRefused("digest:state:0", "arranged")

        with monkeypatch.context() as patched:
            patched.setattr(decode.receiver, "verify", refuse)
            assert (await here.ask()).status_code == 503
        told = await here.figures()
        assert told.of("baton_handoffs_refused_total", part="digest:state") == 2
        assert told.of("baton_reprefills_total") == 1
        assert told.of("baton_requests_total", outcome="handoff_refused") == 1
        assert told.of("baton_nixl_errors_total") == 0

        def disconnect(*_: object) -> None:
            raise nixlRemoteDisconnectError("arranged")

        with monkeypatch.context() as patched:
            patched.setattr(decode.link._nixl, "transfer", disconnect)
            assert (await here.ask()).status_code == 503
        told = await here.figures()
        assert told.of("baton_nixl_errors_total", kind="RemoteDisconnect", room="decode") == 2
        assert told.of("baton_transfer_errors_total", code="transfer_failed") == 2
        assert told.of("baton_http_responses_total", status="503") == 2
        assert (await here.ask()).status_code == 200
