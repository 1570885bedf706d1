"""Plain completions and the tokenizer over HTTP, in front of rooms that speak the contract."""

from __future__ import annotations

import asyncio
import json

import pytest

from common.contract import messages as m
from common.errors import PoisonedState
from tests.unit.test_routes import site

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
        here.world["p1"].gate(m.PrefillJob)
        request = here.http.post(TEXT, json=body(prompt=["a", "b", "c"]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(request, 0.3)
        await here.nothing_left()


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
