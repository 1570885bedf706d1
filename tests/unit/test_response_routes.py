"""`/v1/responses` over HTTP, in front of rooms that only speak the contract.

Longer than 300 lines because it goes through one path, field by field.
"""

from __future__ import annotations

import base64
import io
import json

from PIL import Image

from common.contract import messages as m
from common.errors import CapacityError, PoisonedState
from tests.unit.test_message_routes import CALL, SAID, THOUGHT, prefilled, site

TOOLS = [{"type": "function", "name": "tide", "description": "d", "parameters": {"a": 1}}]
CALL_TEXT = '{"port":"Brest","n":123456789012345678901}'


def body(**fields) -> dict:
    return {
        "model": "nano-k3",
        "max_output_tokens": 120,
        "input": "hi",
        "baton_script": THOUGHT + SAID,
    } | fields


async def ask(here, **fields):
    return await here.http.post("/v1/responses", json=body(**fields))


async def stream(here, **fields) -> list[dict]:
    text = (await ask(here, stream=True, **fields)).text
    events = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def anonymous(response: dict) -> dict:
    """A response without ids and times."""
    items = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]
    ]
    return response | {"output": items, "id": "", "created_at": 0}


async def test_a_whole_response_has_reasoning_then_a_message():
    async with site() as here:
        reply = await ask(here, metadata={"k": "v"}, instructions="Be brief.")
        await here.nothing_left()
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert (told["object"], told["status"]) == ("response", "completed")
    assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
    assert told["output"][0]["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert told["output"][1]["content"][0]["text"] == "Hello, world."
    assert told["metadata"] == {"k": "v"} and told["instructions"] == "Be brief."
    used = told["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert used["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_stream_is_numbered_and_ends_with_the_whole_response():
    async with site() as here:
        events = await stream(here)
        whole = (await ask(here)).json()
        await here.nothing_left()
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    names = []
    for event in events:  # runs of deltas count once
        if not (names and names[-1] == event["type"]):
            names.append(event["type"])
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "Hello, world."
    assert anonymous(events[-1]["response"]) == anonymous(whole)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done


async def test_a_call_keeps_every_digit_whole_and_streamed():
    fields = {"tools": TOOLS, "baton_script": THOUGHT + CALL, "max_output_tokens": 300}
    async with site() as here:
        told = (await ask(here, **fields)).json()
        events = await stream(here, **fields)
    call = told["output"][-1]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "tide", "completed")
    assert call["arguments"].replace(" ", "") == CALL_TEXT
    pieces = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
    assert "".join(e["delta"] for e in pieces) == done["arguments"] == call["arguments"]
    assert {e["item_id"] for e in [*pieces, done]} == {events[-1]["response"]["output"][-1]["id"]}


async def test_a_response_that_the_limit_cut_off_is_incomplete():
    async with site() as here:
        told = (await ask(here, max_output_tokens=3)).json()
        events = await stream(here, max_output_tokens=3)
    for response in (told, events[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_items_become_the_chat_that_says_the_same():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Tides?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "two ports"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "tide", "arguments": '{"p": 1}'},
        {"type": "function_call", "call_id": "b", "name": "tide", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "6"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "7"}],
        },
        {"type": "message", "role": "user", "content": "Well?"},
    ]
    calls = [
        {"id": "a", "function": {"name": "tide", "arguments": '{"p": 1}'}},
        {"id": "b", "function": {"name": "tide", "arguments": "{}"}},
    ]
    chat = {
        "model": "nano-k3",
        "max_tokens": 9,
        "reasoning_effort": "high",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Tides?"},
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "two ports",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "b", "content": "6"},
            {"role": "tool", "tool_call_id": "a", "content": "7"},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "tide", "description": "d", "parameters": {"a": 1}},
            }
        ],
        "tool_choice": "none",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
    }
    async with site() as here:
        reply = await ask(
            here,
            instructions="Be brief.",
            input=items,
            tools=TOOLS,
            tool_choice="none",
            reasoning={"effort": "medium"},
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        )
        assert reply.status_code == 200, reply.text
        told = prefilled(here)
        await here.http.post("/v1/chat/completions", json=chat)
        same = prefilled(here)
    assert same.token_ids == told.token_ids
    assert same.sampling.grammar == told.sampling.grammar is not None


async def test_a_picture_goes_through_the_encoder():
    picture = io.BytesIO()
    Image.new("RGB", (56, 28)).save(picture, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    content = [{"type": "input_image", "image_url": uri}, {"type": "input_text", "text": "what?"}]
    async with site() as here:
        reply = await ask(here, input=[{"role": "user", "content": content}])
        assert reply.status_code == 200, reply.text
        assert here.world["e1"].last(m.EncodeJob).images
        await here.nothing_left()


REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": ["x"]},
        "input[0]",
    ),
    (
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call_output", "call_id": "a", "output": "x"},
            ]
        },
        "input[1].call_id",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
        "input[0].call_id",
    ),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/no"}}}},
        "text.format.schema",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"k": 1}}, "metadata"),
]


async def test_what_is_wrong_is_refused_with_the_clients_name_for_it_and_holds_nothing():
    async with site() as here:
        for fields, param in REFUSED:
            reply = await ask(here, **fields)
            told = reply.json()
            assert reply.status_code == 400, (fields, told)
            assert told["error"]["param"] == param, told
            assert param in told["error"]["message"], told
        assert here.world.held() == {}


async def test_store_has_no_effect_and_is_named():
    async with site() as here:
        reply = await ask(here, store=True, truncation="auto", include=["x"])
    assert reply.headers["x-baton-ignored"] == "truncation, include, store"
    assert reply.json()["store"] is False


async def test_a_client_that_leaves_frees_everything():
    async with site() as here:
        here.world["d1"].pause_after = 3
        request = here.http.build_request("POST", "/v1/responses", json=body(stream=True))
        reply = await here.http.send(request, stream=True)
        assert (await anext(reply.aiter_lines())) == "event: response.created"
        assert here.world.held() != {}
        await reply.aclose()
        await here.nothing_left()


async def test_a_response_that_breaks_ends_as_failed():
    async with site() as here:
        here.world["p1"].plant(m.PrefillJob, *[PoisonedState("layer 3")] * 3)
        events = await stream(here)
        await here.nothing_left()
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


async def test_a_refusal_before_the_stream_is_a_status():
    async with site() as here:
        here.world["d1"].plant(m.Reserve, *[CapacityError("full")] * 200)
        reply = await ask(here, stream=True)
    assert reply.status_code in (429, 503), reply.text
