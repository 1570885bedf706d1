"""Forms over HTTP. Nano was never taught JSON: what is valid here, the masks made valid."""

from __future__ import annotations

import json
import re

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from tests.support.processes import eventually

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"enum": ["groß", "klein", "中"]},
        "parts": {
            "type": "array",
            "items": {"type": "integer", "minimum": -9, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
        "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["city", "size", "parts", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": CITY}}
TOOLS = [
    {"type": "function", "function": {"name": "store", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop_now"}},
]


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def ask(client, server, **fields):
    options = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Describe Paris."}],
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 7,
        "reasoning_effort": "none",
    }
    return client.chat.completions.create(**options | fields)


def test_every_choice_follows_the_schema(client, server):
    for choice in ask(client, server, response_format=FORMAT, n=3).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), CITY)


def test_thoughts_stay_free_before_a_formed_answer(client, server):
    choice = ask(client, server, response_format=FORMAT, reasoning_effort="low").choices[0]
    assert choice.finish_reason in ("stop", "length")
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), CITY)


def test_a_seeded_answer_is_the_same_whole_streamed_and_again(client, server):
    whole = [ask(client, server, response_format=FORMAT).choices[0].message.content for _ in "ab"]
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in ask(client, server, response_format=FORMAT, stream=True)
        if chunk.choices
    )
    assert whole[0] == whole[1] == streamed


def test_an_answer_cut_by_the_limit_says_so(client, server):
    choice = ask(client, server, response_format=FORMAT, max_tokens=3).choices[0]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_with_valid_arguments(client, server, stream):
    reply = ask(client, server, tools=TOOLS, tool_choice="required", stream=stream)
    calls = list(joined(reply)) if stream else reply.choices[0].message.tool_calls
    if not stream:
        assert reply.choices[0].finish_reason == "tool_calls"
        calls = [(call.function.name, call.function.arguments) for call in calls]
    assert calls
    for name, arguments in calls:
        jsonschema.validate(
            json.loads(arguments), CITY if name == "store" else {"maxProperties": 0}
        )


def joined(chunks):
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for piece in (chunk.choices and chunk.choices[0].delta.tool_calls) or ():
            call = calls.setdefault(piece.index, [piece.function.name or "", ""])
            call[1] += piece.function.arguments or ""
    return (tuple(call) for call in calls.values())


def test_a_named_tool_is_the_only_one_called(client, server):
    named = {"type": "function", "function": {"name": "store"}}
    calls = ask(client, server, tools=TOOLS, tool_choice=named).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["store"]
    jsonschema.validate(json.loads(calls[0].function.arguments), CITY)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,5}: (yes|no)"}, r"[A-Z][a-z]{2,5}: (yes|no)"),
        ({"choice": ["ja", "nein", "vielleicht"]}, "ja|nein|vielleicht"),
        ({"grammar": 'root ::= digit{2} ("-" digit{2})?\ndigit ::= [0-9]'}, r"\d\d(-\d\d)?"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_other_forms_are_followed(client, server, form, pattern):
    reply = ask(client, server, extra_body={"structured_outputs": form})
    assert re.fullmatch(pattern, reply.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": schema_of({"$ref": "http://127.0.0.1/s.json"})}, "nothing is fetched"),
        ({"response_format": schema_of({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"response_format": schema_of({"type": "string", "format": "frob"})}, "frob"),
        ({"extra_body": {"structured_outputs": {"regex": "a(?=b)"}}}, "look-around"),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= nothing"}}}, "nothing"),
    ],
)
def test_a_form_that_cannot_be_enforced_is_refused_naming_why(client, server, fields, said):
    with pytest.raises(BadRequestError, match=re.escape(said)):
        ask(client, server, **fields)


def test_nothing_is_held_afterwards(server):
    def is_empty():
        rows = httpx.get(f"{server.admin_url}/admin/inventory").json()["replicas"]
        return not any(row[kind] for row in rows for kind in ("pages", "slots", "tickets"))

    eventually(is_empty, within_s=10.0)
