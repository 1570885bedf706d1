"""A decode process killed under a reader: the stream goes on as if nothing had happened.

The kill strikes at a chosen token: what the process had sent after it is lost with it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.answer import Answer
from tests.support.fleet import Fleet, fleet
from tests.support.nano import nano_tokenizer
from tests.support.processes import write_settings

TABLES = {
    "server": {"port": 0, "admin_port": 0},
    "router": {"heartbeat_s": 0.2, "silent_s": 3.0},
    "testing": {"scripted": True},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup_tide",
        "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}},
    },
}
SCRIPT = (
    "Need the tide, and the light as well."
    "<|close|>think<|sep|><|open|>response<|sep|>I look it up, EN EN E. One moment."
    "<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="lookup_tide" index="1"<|sep|>'
    '<|open|>argument key="harbour" type="string"<|sep|>Brest and "Ouessant"'
    "<|close|>argument<|sep|>"
    '<|open|>argument key="hours" type="number"<|sep|>36<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
SCRIPTED = {
    "messages": [{"role": "user", "content": "Tide at Brest?"}],
    "tools": [TOOL],
    "stop": ["END", "ENOUGH"],
    "max_tokens": 200,
    "baton_script": SCRIPT,
}
SAMPLED = {
    "prompt": "The picture shows a red circle and a blue square. The circle is",
    "max_tokens": 60,
    "min_tokens": 40,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 17,
    "n": 2,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logprobs": 2,
    "logit_bias": {str(number): -100 for number in nano_tokenizer().specials.values()},
}

FORMED = {
    "messages": [{"role": "user", "content": "Name a colour, and how many circles there are."}],
    "max_tokens": 120,
    "temperature": 1.0,
    "seed": 23,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "schema": {
                "type": "object",
                "properties": {
                    "colour": {"type": "string", "maxLength": 12},
                    "circles": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
                    "sure": {"type": "boolean"},
                },
                "required": ["colour", "circles", "sure"],
                "additionalProperties": False,
            },
        },
    },
}


class Killer:
    """Kills the process that decodes, when the first choice has so many tokens."""

    def __init__(self, running: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self._running = running
        self._take, self._lost = Answer.take, Answer.lost
        self.at: int | None = None
        self._deaf: Answer | None = None
        self.killed: list[Any] = []
        monkeypatch.setattr(Answer, "take", lambda answer, item: self.take(answer, item))
        monkeypatch.setattr(Answer, "lost", lambda answer, error: self.lost(answer, error))

    def take(self, answer: Answer, item) -> None:
        if answer is self._deaf:
            return
        self._take(answer, item)
        if self.at is not None and len(answer.log[0]) == self.at and item.choice == 0:
            process = self._running.busy("decode")
            if process is None:  # the first token: prefill made it
                return
            process.signal(9)
            self.killed.append(process)
            self.at, self._deaf = None, answer

    def lost(self, answer: Answer, error) -> None:
        self._deaf = None
        self._lost(answer, error)


async def asked(running: Fleet, body: dict[str, Any]) -> dict[str, Any]:
    """What a client puts together from the stream."""
    path = "chat/completions" if "messages" in body else "completions"
    whole: dict[str, Any] = {"choices": {}, "usage": None, "done": False}
    body = body | {"model": "nano-k3", "stream": True, "stream_options": {"include_usage": True}}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{running.url}/v1/{path}", json=body) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                whole["done"] = True
            elif line.startswith("data: "):
                absorb(whole, json.loads(line.removeprefix("data: ")))
    return whole


def absorb(whole: dict[str, Any], chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    whole["usage"] = chunk.get("usage") or whole["usage"]
    for choice in chunk["choices"]:
        mine = whole["choices"].setdefault(
            choice["index"],
            {"content": "", "reasoning_content": "", "calls": {}, "logprobs": [], "finish": None},
        )
        delta = choice.get("delta", {"content": choice.get("text")})
        for field in ("content", "reasoning_content"):
            mine[field] += delta.get(field) or ""
        for call in delta.get("tool_calls") or []:
            one = mine["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            one["name"] += call["function"].get("name") or ""
            one["arguments"] += call["function"].get("arguments") or ""
        told = choice.get("logprobs") or {}
        mine["logprobs"] += told.get("token_logprobs") or told.get("content") or []
        mine["finish"] = choice["finish_reason"] or mine["finish"]


def moments() -> dict[str, int]:
    """Tokens of the script after which something is half said."""
    tokenizer = nano_tokenizer()

    def after(words: str) -> int:
        return len(tokenizer.encode_marked(SCRIPT[: SCRIPT.index(words) + len(words)]))

    return {
        "reasoning half sent": after("Need the tide, and"),
        "a stop string half matched": after("look it up, EN"),
        "a tool call half sent": after('harbour" type="string"<|sep|>Brest and'),
    }


async def killed(running: Fleet, killer: Killer, body, at: int) -> dict[str, Any]:
    killer.at = at
    got = await asyncio.wait_for(asked(running, body), 60)
    process = killer.killed.pop()
    await running.kill(process)
    return got


async def test_what_was_half_said_when_decode_was_killed_is_said_to_its_end(tmp_path, monkeypatch):
    path = write_settings(tmp_path / "settings.toml", TABLES)
    async with fleet(path, decode=3) as running:
        whole, sampled = await asked(running, SCRIPTED), await asked(running, SAMPLED)
        assert whole["done"] and whole["choices"][0]["finish"] == "tool_calls"
        assert '\\"Ouessant\\"' in whole["choices"][0]["calls"][0]["arguments"]
        assert "EN EN E." in whole["choices"][0]["content"]
        killer = Killer(running, monkeypatch)
        at = moments()["a tool call half sent"]
        assert await killed(running, killer, SCRIPTED, at) == whole
        early = stopped_early(sampled)
        half = await asked(running, early)
        assert half["choices"][1]["finish"] == "stop" and half["choices"][0]["finish"] == "length"
        assert await killed(running, killer, early, 40) == half
        await running.nothing_left()


@pytest.mark.slow
async def test_a_form_half_filled_in_when_decode_was_killed_is_filled_in(tmp_path, monkeypatch):
    path = write_settings(tmp_path / "settings.toml", TABLES)
    async with fleet(path, decode=2) as running:
        whole = await asked(running, FORMED)
        filled = whole["choices"][0]["content"]
        assert set(json.loads(filled)) == {"colour", "circles", "sure"}
        tokens = whole["usage"]["completion_tokens"]
        killer = Killer(running, monkeypatch)
        assert await killed(running, killer, FORMED, tokens * 2 // 3) == whole
        await running.nothing_left()


def stopped_early(sampled: dict[str, Any]) -> dict[str, Any]:
    """The sampled request with a stop string that only one choice says, before the kill."""
    one, other = (sampled["choices"][choice]["content"] for choice in (0, 1))
    words = (other[start : start + 4] for start in range(8, len(other) // 3))
    found = [word for word in words if word not in one]
    assert found, f"the choices say the same: {one!r}, {other!r}"
    return SAMPLED | {"stop": found[:1]}


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments())
async def test_every_half_said_thing_survives_a_kill(tmp_path, monkeypatch, moment):
    path = write_settings(tmp_path / "settings.toml", TABLES)
    async with fleet(path, decode=3) as running:
        whole = await asked(running, SCRIPTED)
        killer = Killer(running, monkeypatch)
        for late in (0, 1):
            at = moments()[moment] + late
            assert await killed(running, killer, SCRIPTED, at) == whole
