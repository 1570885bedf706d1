"""Anthropic's paths over HTTP, in front of rooms that only speak the contract.

Longer than 300 lines because it goes through one path, field by field.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json

import pytest
from PIL import Image

from common.config import settings as cs
from common.contract import messages as m
from common.errors import PoisonedState
from tests.unit import test_routes

# Probes come and go and would take what is planted for requests: the first one is enough.
ROUTER = dataclasses.replace(test_routes.SETTINGS.router, probe_s=600.0)
QUIET = dataclasses.replace(test_routes.SETTINGS, router=ROUTER)
THOUGHT = "I think.<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>message<|sep|>"
SAID = "Hello, world.<|close|>response<|sep|>" + END
CALL = (
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="tide" index="1"<|sep|>'
    '<|open|>argument key="port" type="string"<|sep|>Brest<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>123456789012345678901<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>" + END
)
TOOLS = [{"name": "tide", "description": "d", "input_schema": {"type": "object"}}]


def site(settings=QUIET):
    return test_routes.site(settings)


def prefilled(here) -> m.PrefillJob:
    """The last request's job, probes passed over."""
    jobs = [job for job in here.world["p1"].seen if isinstance(job, m.PrefillJob)]
    return [job for job in jobs if not job.request.startswith("probe")][-1]


def body(**fields) -> dict:
    return {
        "model": "nano-k3",
        "max_tokens": 120,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "baton_script": THOUGHT + SAID,
    } | fields


async def ask(here, path="/v1/messages", **fields):
    return await here.http.post(path, json=body(**fields))


async def stream(here, **fields) -> list[tuple[str, dict]]:
    text = (await ask(here, stream=True, **fields)).text
    events = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def test_a_whole_message_has_thinking_then_text():
    async with site() as here:
        reply = await ask(here)
        await here.nothing_left()
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert told["type"] == "message" and told["role"] == "assistant"
    assert [b["type"] for b in told["content"]] == ["thinking", "text"]
    assert told["content"][0]["thinking"] == "I think."
    assert told["content"][1] == {"type": "text", "text": "Hello, world."}
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)
    assert told["usage"]["input_tokens"] > 0 and told["usage"]["output_tokens"] > 0


async def test_a_stream_tells_the_same_message_in_the_order_of_events():
    async with site() as here:
        events = await stream(here)
        whole = (await ask(here)).json()
        await here.nothing_left()
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [d["delta"] for _, d in events if d["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "I think."
    assert "".join(d.get("text", "") for d in deltas) == "Hello, world."
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"] == whole["usage"]
    starts = [d["index"] for _, d in events if d["type"] == "content_block_start"]
    stops = [d["index"] for _, d in events if d["type"] == "content_block_stop"]
    assert starts == stops == [0, 1]


async def test_without_thinking_the_prompt_opens_the_response():
    async with site() as here:
        told = (await ask(here, thinking=None, baton_script=SAID)).json()
    assert told["content"] == [{"type": "text", "text": "Hello, world."}]


async def test_a_call_keeps_every_digit_whole_and_streamed():
    fields = {"tools": TOOLS, "baton_script": THOUGHT + CALL}
    async with site() as here:
        reply = await ask(here, **fields)
        events = await stream(here, **fields)
    assert '"input":{"port":"Brest","n":123456789012345678901}' in reply.text.replace(" ", "")
    assert reply.json()["stop_reason"] == "tool_use"
    starts = [d["content_block"] for _, d in events if d["type"] == "content_block_start"]
    assert starts[-1]["name"] == "tide" and starts[-1]["input"] == {}
    text = "".join(
        d["delta"].get("partial_json", "") for _, d in events if d["type"] == "content_block_delta"
    )
    assert json.loads(text) == {"port": "Brest", "n": 123456789012345678901}


async def test_a_call_that_the_limit_cuts_off_has_no_arguments_in_a_whole_message():
    async with site() as here:
        full = (await ask(here, tools=TOOLS, baton_script=THOUGHT + CALL)).json()
        most = full["usage"]["output_tokens"] - 14
        told = (await ask(here, tools=TOOLS, baton_script=THOUGHT + CALL, max_tokens=most)).json()
    assert told["stop_reason"] == "max_tokens"
    assert told["content"][-1]["input"] == {}


async def test_a_stop_sequence_is_named_and_left_out():
    async with site() as here:
        told = (await ask(here, stop_sequences=["wor", "never"])).json()
        await here.nothing_left()
    assert told["content"][1]["text"] == "Hello, "
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "wor")


async def test_turns_tools_and_results_become_the_chat_that_says_the_same():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Tides?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "two ports", "signature": "x"},
                {"type": "tool_use", "id": "a", "name": "tide", "input": {"port": "Brest"}},
                {"type": "tool_use", "id": "b", "name": "tide", "input": {"port": "Dover"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": "6"},
                {"type": "tool_result", "tool_use_id": "a", "content": [], "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    calls = [
        {"id": i, "function": {"name": "tide", "arguments": json.dumps({"port": port})}}
        for i, port in (("a", "Brest"), ("b", "Dover"))
    ]
    chat = {
        "model": "nano-k3",
        "max_tokens": 9,
        "reasoning_effort": "low",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Tides?"},
            {"role": "assistant", "reasoning_content": "two ports", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "b", "content": "6"},
            {"role": "tool", "tool_call_id": "a", "content": "error"},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "tide", "description": "d", "parameters": {"type": "object"}},
            }
        ],
        "tool_choice": "required",
    }
    async with site() as here:
        reply = await ask(
            here,
            system="Be brief.",
            messages=messages,
            tools=TOOLS,
            tool_choice={"type": "any"},
        )
        assert reply.status_code == 200, reply.text
        told = prefilled(here)
        await here.http.post("/v1/chat/completions", json=chat)
        same = prefilled(here)
    assert same.token_ids == told.token_ids
    assert same.sampling.grammar == told.sampling.grammar is not None


@pytest.mark.parametrize("kind", ["user", "tool_result"])
async def test_a_picture_in_base64_goes_through_the_encoder(kind):
    picture = io.BytesIO()
    Image.new("RGB", (56, 28)).save(picture, "PNG")
    data = base64.b64encode(picture.getvalue()).decode()
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
    if kind == "tool_result":
        call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    async with site() as here:
        reply = await ask(here, messages=messages)
        assert reply.status_code == 200, reply.text
        assert here.world["e1"].last(m.EncodeJob).images
        counted = (await ask(here, "/v1/messages/count_tokens", messages=messages)).json()
        assert counted == {"input_tokens": reply.json()["usage"]["input_tokens"]}
        await here.nothing_left()


async def test_a_form_is_enforced_and_refused_by_this_apis_name():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with site() as here:
        form = {"type": "json_schema", "schema": schema}
        reply = await ask(here, output_config={"format": form})
        assert reply.status_code == 200, reply.text
        assert prefilled(here).sampling.grammar
        form = {"type": "json_schema", "schema": {"$ref": "https://x/y"}}
        refused = await ask(here, output_config={"format": form})
        tools = [{"name": "tide", "input_schema": {"$ref": "#/nowhere"}}]
        refused_tool = await ask(here, tools=tools, tool_choice={"type": "any"})
    assert refused.status_code == refused_tool.status_code == 400
    assert "`output_config.format" in refused.json()["error"]["message"]
    assert "`tools[0].input_schema" in refused_tool.json()["error"]["message"]


REFUSED = [
    ({"max_tokens": None}, "`max_tokens`"),
    ({"max_tokens": 0}, "`max_tokens` is 0; it must be an integer from 1"),
    ({"messages": []}, "`messages`"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "user, assistant or system"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "`messages[0].content[0].type`",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "does not belong in a message of role user",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}],
                },
            ]
        },
        "`messages[1].content[0].tool_use_id` answers no earlier tool call",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        "`messages[0].content[0].tool_use_id` answers no earlier tool call",
    ),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]},
        "end them with the user",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}],
                }
            ]
        },
        "`messages[0].content[0]`: the data is no image that can be read",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "base64", "data": "%"}}],
                }
            ]
        },
        "the image's data is not base64",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "data": "AA", "media_type": "text/css"},
                        }
                    ],
                }
            ]
        },
        'source.media_type` is "text/css"; it must be image/png, image/jpeg',
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`tools[0].type`"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "`tools[0].name`"),
    ({"tool_choice": {"type": "tool"}}, "`tool_choice.name`"),
    ({"tool_choice": {"type": "any"}}, "`tools` is empty"),
    ({"thinking": {"type": "sometimes"}}, "enabled, adaptive or disabled"),
    ({"stop_sequences": [""]}, "`stop_sequences`"),
    ({"temperature": 3}, "`temperature` is 3"),
    ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not supported"),
]


async def test_what_is_wrong_is_refused_in_this_apis_shape_and_holds_nothing():
    async with site() as here:
        for fields, words in REFUSED:
            reply = await ask(here, **fields)
            told = reply.json()
            assert reply.status_code == 400, (fields, told)
            assert told["type"] == "error" and set(told["error"]) == {"type", "message"}
            assert told["error"]["type"] == "invalid_request_error"
            assert words in told["error"]["message"], told
        assert here.world.held() == {}


async def test_every_kind_of_refusal_has_this_apis_shape():
    async with site() as here:
        unknown = await ask(here, model="other")
        method = await here.http.get("/v1/messages")
        large = await ask(here, system="x" * 300_000)
        nowhere = await here.http.get("/v1/messages/batches")
    for reply, status, kind in (
        (unknown, 404, "not_found_error"),
        (method, 405, "invalid_request_error"),
        (large, 413, "request_too_large"),
        (nowhere, 404, "not_found_error"),
    ):
        assert reply.status_code == status
        assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind
        assert reply.json()["request_id"] == reply.headers["request-id"]
        assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_the_door_speaks_this_api_on_its_paths():
    key = "k" * 40
    access = cs.AccessSettings(keys=(f"one:{hashlib.sha256(key.encode()).hexdigest()}",))
    async with site(dataclasses.replace(QUIET, access=access)) as here:
        refused = await ask(here)
        served = await here.http.post(
            "/v1/messages",
            json=body(),
            headers={"x-api-key": key, "anthropic-version": "2023-06-01"},
        )
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert served.status_code == 200


async def test_a_client_that_leaves_frees_everything():
    async with site() as here:
        here.world["d1"].pause_after = 3
        request = here.http.build_request("POST", "/v1/messages", json=body(stream=True))
        reply = await here.http.send(request, stream=True)
        assert (await anext(reply.aiter_lines())) == "event: message_start"
        assert here.world.held() != {}
        await reply.aclose()
        await here.nothing_left()


async def test_an_error_inside_a_stream_is_an_error_event_and_nothing_follows():
    async with site() as here:
        here.world["p1"].plant(m.PrefillJob, *[PoisonedState("layer 3")] * 3)
        events = await stream(here)
        await here.nothing_left()
    assert [name for name, _ in events] == ["message_start", "ping", "error"]
    assert events[-1][1]["error"]["type"] == "api_error"


async def test_fields_without_effect_are_named_in_a_header():
    async with site() as here:
        reply = await ask(here, metadata={"user_id": "u"}, service_tier="auto")
    assert reply.headers["x-baton-ignored"] == "service_tier, metadata"
