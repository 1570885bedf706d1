"""The OpenAPI page is true: every path is on it, and real bodies and replies follow it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from router.openapi import openapi
from tests.unit import test_message_routes, test_response_routes
from tests.unit.test_message_routes import site

DOC = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```json (POST|GET) (\S+)\n(.*?)```", DOC, re.DOTALL)
PAGE = openapi()


def check(value, schema) -> None:
    """Validate against a schema of the page."""
    document = {"$ref": "#/schema", "schema": schema, "components": PAGE["components"]}
    jsonschema.Draft202012Validator(document).validate(value)


def content(path: str, status: int = 200) -> dict:
    [operation] = PAGE["paths"][path].values()
    return operation["responses"][str(status)]["content"]


def check_reply(path: str, reply) -> None:
    """Validate a whole reply, or every event of a stream."""
    kind = reply.headers["content-type"].split(";")[0]
    schema = content(path, reply.status_code)[kind]["schema"]
    if kind == "application/json":
        check(reply.json(), schema)
        return
    datas = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    assert datas
    for data in datas:
        if data != "[DONE]":
            check(json.loads(data), schema)


def test_schemas_are_sound():
    for schema in PAGE["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_every_public_path_is_on_the_page_and_every_path_of_it_is_served():
    async with site() as here:
        served = (await here.http.get("/openapi.json")).json()
        assert served == json.loads(json.dumps(PAGE))
        for path, operations in PAGE["paths"].items():
            [method] = operations
            at = path.replace("{model}", "nano-k3")
            answers = {m: (await here.http.request(m, at)).status_code for m in ("get", "post")}
            assert answers.pop(method) not in (404, 405), path
            assert set(answers.values()) == {405}, path
    source = (Path(__file__).parents[2] / "router" / "routes.py").read_text()
    routed = set(re.findall(r'Route\("([^"]+)"', source.replace(":path}", "}")))
    routed -= {"/openapi.json", "/-/healthz"}
    assert routed == set(PAGE["paths"])


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready"])
async def test_what_is_read_follows_the_page(path):
    async with site() as here:
        check_reply(path, await here.http.get(path))


def test_the_examples_cover_every_path_with_a_body():
    assert {path for _, path, _ in EXAMPLES} == {
        path for path, operations in PAGE["paths"].items() if "post" in operations
    }


async def test_every_example_of_the_description_follows_the_page_and_is_answered():
    async with site() as here:
        for method, path, text in EXAMPLES:
            body = json.loads(text)
            schema = PAGE["paths"][path][method.lower()]["requestBody"]["content"]
            check(body, schema["application/json"]["schema"])
            reply = await here.http.request(method, path, json=body)
            assert reply.status_code == 200, (path, reply.text)
            assert "x-baton-ignored" not in reply.headers, path
            check_reply(path, reply)
        await here.nothing_left()


async def test_replies_with_calls_reasoning_and_refusals_follow_the_page():
    script = test_message_routes.THOUGHT + test_message_routes.CALL
    messages = test_message_routes.body(tools=test_message_routes.TOOLS, baton_script=script)
    responses = test_response_routes.body(tools=test_response_routes.TOOLS, baton_script=script)
    chat = {
        "model": "nano-k3",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "tide"}}],
        "baton_script": script,
        "logprobs": True,
        "top_logprobs": 1,
    }
    bodies = {
        "/v1/messages": messages,
        "/v1/responses": responses,
        "/v1/chat/completions": chat,
    }
    async with site() as here:
        for path, body in bodies.items():
            for fields in ({}, {"stream": True}, {"temperature": "hot"}, {"model": "other"}):
                check_reply(path, await here.http.post(path, json=body | fields))
