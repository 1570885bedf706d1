"""Thousands of bodies that are wrong in one or more places: refused or read, and nothing else."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter

import pytest

from common.contract.messages import ImageRef
from common.errors import InvalidRequest, NotFound
from router.faults import describe
from router.prompt.template import render
from router.schema import (
    RequestLimits,
    fit_sampling,
    ignored_header,
    image_sources,
    parse_chat,
    parse_completion,
)
from router.schema.anthropic_chat import parse_messages
from router.schema.responses_chat import parse_response
from tests.support.nano import nano_tokenizer
from tests.support.rooms import until
from tests.unit.test_routes import site

TOKENIZER = nano_tokenizer()
LIMITS = RequestLimits(
    models=frozenset({"nano"}), vocab=1536, context=8192, eos=1282, media_pad=1301, scripted=True
)
CHAT = {
    "model": "nano",
    "messages": [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "system", "tools": [{"type": "function", "function": {"name": "late"}}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "tide", "arguments": '{"a": [1, 1e-7, "x"]}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "6"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "tide", "parameters": {"type": "object"}, "strict": True},
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "tide"}},
    "temperature": 0.5,
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stop_token_ids": [7],
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}},
    "logprobs": True,
    "top_logprobs": 2,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"thinking": True},
    "baton_script_ids": [5],
    "max_tokens": 5,
}
MESSAGES = {
    "model": "nano",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "source": {"type": "url", "url": "https://x"}},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "x"},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c1", "name": "tide", "input": {"a": [1, 1e-7]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "6", "is_error": True},
                {"type": "text", "text": "b"},
            ],
        },
    ],
    "tools": [{"name": "tide", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "tide", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
    "stop_sequences": ["x"],
    "top_k": 5,
    "stream": True,
    "metadata": {"user_id": "u"},
}
RESPONSES = {
    "model": "nano",
    "instructions": "s",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": "data:x", "detail": "low"},
            ],
        },
        {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": '{"a": [1]}'},
        {"type": "function_call_output", "call_id": "c1", "output": "6"},
    ],
    "tools": [{"type": "function", "name": "tide", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "tide"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": 1}, "strict": True}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 5,
    "include": ["reasoning.encrypted_content"],
    "metadata": {"k": "v"},
    "stream": True,
}
TEXT = {"model": "nano", "prompt": [[5, 6], [7]], "n": 2, "max_tokens": 5, "logprobs": 1}
ODD = (
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\x00",
    "<|open|>",
    [],
    {},
    [None],
    [[]],
    {"type": "text"},
    {"role": "user"},
    "9" * 500,
    {"": {"": []}},
)


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        steps = value.items() if isinstance(value, dict) else enumerate(value)
        for step, item in steps:
            yield from places(item, (*path, step))


def mutated(body, rng: random.Random):
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([path for path in places(body) if path])
        inner = body
        for step in path[:-1]:
            inner = inner[step]
        match rng.randint(0, 3):
            case 0:
                del inner[path[-1]]
            case 1 if isinstance(inner, list):
                inner.append(copy.deepcopy(rng.choice(ODD)))
            case _:
                inner[path[-1]] = copy.deepcopy(rng.choice(ODD))
        if not body:
            break
    return body


def answer_chat(raw: bytes) -> None:
    answer_request(parse_chat(raw, LIMITS))


def answer_message(raw: bytes) -> None:
    answer_request(parse_messages(raw, LIMITS).chat)


def answer_response(raw: bytes) -> None:
    answer_request(parse_response(raw, LIMITS).chat)


def answer_request(request) -> None:
    images = [ImageRef(digest=b"", width=1, height=1, tokens=1)] * len(
        image_sources(request.messages)
    )
    prompt = render(
        TOKENIZER,
        request.messages,
        tools=request.tools,
        thinking=request.thinking,
        effort=request.effort,
        tool_choice=request.tool_choice,
        response_format=request.response_format,
        images=images,
    )
    fit_sampling(request, len(prompt.token_ids), LIMITS)
    ignored_header(request.ignored).encode("latin-1")


def answer_text(raw: bytes) -> None:
    request = parse_completion(raw, LIMITS)
    fit_sampling(request, 1, LIMITS, param="prompt")


@pytest.mark.parametrize(
    ("body", "answer", "count"),
    [
        (CHAT, answer_chat, 4000),
        (TEXT, answer_text, 1000),
        (MESSAGES, answer_message, 2000),
        (RESPONSES, answer_response, 2000),
    ],
)
def test_a_malformed_body_is_refused_or_read(body, answer, count):
    rng = random.Random(0)
    answer(json.dumps(body).encode())
    refused = 0
    for _ in range(count):
        raw = json.dumps(mutated(body, rng)).encode()
        if rng.random() < 0.1:
            raw = raw[: rng.randint(0, len(raw))]
        try:
            answer(raw)
        except (InvalidRequest, NotFound) as error:
            refused += 1
            fault = describe(error)
            assert fault.status in (400, 404) and len(json.dumps(fault.body)) < 2000
            assert "Struct" not in str(error) and "object at 0x" not in str(error)
    assert count * 0.3 < refused < count


PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.slow)])
async def test_malformed_bodies_over_http_get_no_500_and_leave_nothing(count):
    rng = random.Random(1)
    seen = Counter()
    async with site() as here:
        for number in range(count):
            path = list(PATHS)[number % len(PATHS)]
            body = mutated(PATHS[path] | {"model": "nano-k3"}, rng)
            raw = json.dumps(body).encode()
            if rng.random() < 0.1:
                raw = raw[: rng.randint(0, len(raw))]
            reply = await here.http.post(path, content=raw)
            assert reply.status_code in (200, 400, 404), reply.text
            seen[reply.status_code] += 1
        await here.nothing_left()
        await until(lambda: here.router.house.running == 0)
    assert seen[400] > count * 0.3 and seen[200] > 0
