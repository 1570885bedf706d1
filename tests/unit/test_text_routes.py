"""Plain completions and the tokenizer over HTTP, in front of rooms that speak the contract."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from common.contract import messages as m
from common.errors import PoisonedState
from tests.support.rooms import until
from tests.unit.test_routes import SETTINGS, site

TEXT = "/v1/completions"


def body(**fields) -> dict:
    return {"model": "nano-k3", "prompt": "One", "baton_script": " two three"} | fields


def data(text: str) -> list[str]:
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]


async def test_a_prompt_is_continued():
    async with site() as here:
        told = (await here.http.post(TEXT, json=body(echo=True))).json()
        assert told["choices"][0]["text"] == "One two three"
        assert told["choices"][0]["finish_reason"] == "stop"
        assert told["usage"]["prompt_tokens"] > 0
        await here.nothing_left()


async def test_several_prompts_are_answered_as_one():
    async with site() as here:
        asked = body(prompt=["a", [5, 6, 7]], n=2)
        told = (await here.http.post(TEXT, json=asked)).json()
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
        prompts = [x.token_ids for x in here.world["p1"].seen if isinstance(x, m.PrefillJob)]
        assert (5, 6, 7) in prompts
        streamed = data((await here.http.post(TEXT, json=asked | {"stream": True})).text)
        assert streamed[-1] == "[DONE]"
        texts = [""] * 4
        for chunk in map(json.loads, streamed[:-1]):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in told["choices"]]
        await here.nothing_left()


async def test_a_failure_of_one_prompt_fails_the_request_and_frees_the_others():
    async with site() as here:
        here.world["p1"].plant(m.PrefillJob, PoisonedState("x"))
        reply = await here.http.post(TEXT, json=body(prompt=["a", "b"]))
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "non_finite"
        await here.nothing_left()


async def test_a_failure_inside_a_stream_is_an_event_without_done():
    async with site() as here:
        here.world["p1"].plant(m.PrefillJob, PoisonedState("x"))
        events = data((await here.http.post(TEXT, json=body(stream=True))).text)
        assert json.loads(events[-1])["error"]["code"] == "non_finite"
        await here.nothing_left()


async def test_a_client_that_leaves_takes_all_its_prompts_along():
    async with site() as here:
        here.router.readiness._due_at = lambda pair: float("inf")  # a probe would be held too
        here.world["p1"].gate(m.PrefillJob)
        request = here.http.post(TEXT, json=body(prompt=["a", "b", "c"]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(request, 0.3)
        await here.nothing_left()


async def test_a_request_with_more_prompts_than_there_is_room_for_waits_behind_itself():
    """Longer than a stranger may wait, and with more prompts than may wait."""
    router = dataclasses.replace(SETTINGS.router, queue_wait_s=0.3, queue_limit=2)
    async with site(dataclasses.replace(SETTINGS, router=router)) as here:
        here.router.readiness._due_at = lambda pair: float("inf")
        here.world["d1"].slots = 2
        here.world.step_s = 0.02
        asked = body(prompt=[f"{number}" for number in range(12)], baton_script="x" * 12)
        for stream in (False, True):
            most, sending = (
                0,
                asyncio.create_task(here.http.post(TEXT, json=asked | {"stream": stream})),
            )
            while not sending.done():
                most = max(most, len(here.router.house.admission))
                await asyncio.sleep(0.005)
            reply = sending.result()
            assert reply.status_code == 200, reply.text
            assert most == 1
            assert stream is False or reply.text.endswith("data: [DONE]\n\n")
            await here.nothing_left()


async def test_the_first_prompt_is_refused_like_a_strangers():
    router = dataclasses.replace(SETTINGS.router, queue_wait_s=0.1)
    async with site(dataclasses.replace(SETTINGS, router=router)) as here:
        here.world["d1"].slots = 0
        for stream in (False, True):
            reply = await here.http.post(TEXT, json=body(prompt=["a", "b"], stream=stream))
            assert reply.status_code == 429


async def test_the_lower_priority_gets_the_next_place():
    async with site() as here:
        here.router.readiness._due_at = lambda pair: float("inf")
        here.world["d1"].slots = 0
        sent = []
        for number, priority in enumerate((2, 0, -3)):
            asked = body(prompt=[[number + 5]], priority=priority)
            sent.append(asyncio.create_task(here.http.post(TEXT, json=asked)))
            await until(lambda: len(here.router.house.admission) == len(sent))
        here.world["d1"].slots = 1
        replies = await asyncio.gather(*sent)
        assert [reply.status_code for reply in replies] == [200] * 3
        seen = [x.token_ids[0] for x in here.world["p1"].seen if isinstance(x, m.PrefillJob)]
        assert [first for first in seen if first in (5, 6, 7)] == [7, 6, 5]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": "x " * 9000}, "prompt"), ({"prompt": ""}, "prompt"), ({"n": 99}, "n")],
)
async def test_what_cannot_be_continued_is_refused(fields, param):
    async with site() as here:
        reply = await here.http.post(TEXT, json=body(**fields))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param


async def test_text_goes_through_the_tokenizer_and_back():
    async with site() as here:
        text = "héllo <|open|> 🌊"
        told = (await here.http.post("/tokenize", json={"prompt": text})).json()
        assert told["count"] == len(told["tokens"])
        back = await here.http.post("/detokenize", json={"tokens": told["tokens"]})
        assert back.json() == {"prompt": text}
        refused = await here.http.post("/detokenize", json={"tokens": [99999]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
