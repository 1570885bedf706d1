"""The held-out questions, through HTTP with the official client: answers, not fluency.

Another file of the same format may be named by BATON_NANO_EVAL.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.processes import ROOT, eventually
from tests.support.scenes import as_sent

EVAL = Path(os.environ.get("BATON_NANO_EVAL", ROOT / "tests/data/nano_eval.jsonl"))
CASES = [json.loads(line) for line in EVAL.read_text().splitlines()]
SURE = 0.1  # a correct answer whose least lead is above this must come
AT_ONCE = 8


def ask(client: OpenAI, model: str, case: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Content and tool calls of the greedy answer."""
    options: dict[str, Any] = {
        "model": model,
        "messages": as_sent(case["messages"]),
        "temperature": 0,
        "max_tokens": 160,
        "reasoning_effort": case["effort"] if case["thinking"] else "none",
    }
    if "tools" in case:
        options["tools"] = case["tools"]
    if not stream:
        message = client.chat.completions.create(**options).choices[0].message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        content = message.content
    else:
        content, calls = joined(client.chat.completions.create(stream=True, **options))
    named = [{"name": name, "arguments": json.loads(text)} for name, text in calls]
    return {"content": content or "", "tool_calls": named}


def joined(stream) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", {}
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                name, text = calls.get(call.index, ("", ""))
                calls[call.index] = (
                    name + (call.function.name or ""),
                    text + (call.function.arguments or ""),
                )
    return content, [calls[index] for index in sorted(calls)]


def is_right(case: dict[str, Any], answer: dict[str, Any]) -> bool:
    expected = case["expected"]
    return (answer["content"], answer["tool_calls"]) == (
        expected["content"] or "",
        expected["tool_calls"],
    )


def everything_back(server) -> bool:
    inventory = httpx.get(f"{server.admin_url}/admin/inventory").json()
    keys = ("pages", "slots", "quarantine", "embeddings", "tickets")
    return not any(replica[key] for replica in inventory["replicas"] for key in keys)


@pytest.mark.parametrize(
    "stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["streamed", "whole"]
)
def test_held_out_questions_are_answered_as_the_checkpoint_can(server, stream):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda case: ask(client, server.model, case, stream=stream), CASES))
    right = {c["id"] for c, answer in zip(CASES, answers, strict=True) if is_right(c, answer)}
    missed = [c["id"] for c in CASES if c["correct"] and c["id"] not in right]
    print(f"{len(right)} of {len(CASES)} right; correct on record but missed: {missed}")
    sure = [c["id"] for c in CASES if c["id"] in missed and c["margin"] > SURE]
    assert not sure, f"wrong although the checkpoint is sure: {sure}"
    assert len(right) >= sum(case["correct"] for case in CASES) - 1
    eventually(lambda: everything_back(server), within_s=10)
