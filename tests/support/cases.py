"""The HTTP cases: reading them, filling their placeholders, sending them, putting replies together.

Knows the file format (`tests/data/http_cases.jsonl`, or the file named by `BATON_CASES`) and how a
client joins a stream. What must hold is written in `tests/support/checks.py`.

Longer than 300 lines because one file knows the form of the cases, from reading to replies.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.support.nano import ROOT, nano_tokenizer
from tests.support.pictures import picture

FILE = Path(os.environ.get("BATON_CASES", ROOT / "tests/data/http_cases.jsonl"))

# Keys of `setup` that a machine can carry out, or that only explain.
READABLE = {
    "scripted_output",
    "scripted_output_means",
    "scripted_tokens",
    "ends",
    "note",
    "stream_splits",
    "also",
    "compare_with",
    "synth",
}
HUGE = 100_000_000  # characters; a body of this size is announced and begun, not built

_TOKENIZER = nano_tokenizer()
_WAVE = "👩‍👧 日本 ď"


def _bytes_of(text: str) -> list[int]:
    single = {_TOKENIZER.piece(token): token for token in range(_TOKENIZER.base)}
    return [single[bytes([value])] for value in text.encode()]


SCRIPTED_TOKENS = {
    "the very first token is end-of-message": [],
    "byte-level tokens that spell one 4-byte emoji over 2 to 4 tokens": _bytes_of("🌊"),
    f"byte-level tokens spelling '{_WAVE}' with at least three characters split over tokens": (
        _bytes_of(_WAVE)
    ),
    "first of the tokens that spell one emoji": _bytes_of("🌊"),
}


class Server(Protocol):
    """What a running server has to tell. `allowed_host` is a host and port, free to listen on,
    from which its settings let images be fetched; a server may have none."""

    url: str
    admin_url: str
    model: str


@dataclass(frozen=True)
class Case:
    id: str
    area: str
    request: dict[str, Any]
    expect: dict[str, Any]
    setup: dict[str, Any]

    @property
    def statuses(self) -> list[int]:
        status = self.expect["status"]
        return status if isinstance(status, list) else [status]

    @property
    def script(self) -> list[int] | None:
        """Ids the server is to say, without the end of the message."""
        if "scripted_output" in self.setup:
            return _TOKENIZER.encode_marked(repeat(self.setup["scripted_output"]))
        words = self.setup.get("scripted_tokens")
        return SCRIPTED_TOKENS.get(words) if words else None

    @property
    def ends_at_limit(self) -> bool:
        words = self.setup.get("ends", "") + self.setup.get("scripted_tokens", "")
        return "token limit" in words or words.startswith("first of")

    def why_not(self) -> str | None:
        """Why this case cannot be run from its description alone; None when it can."""
        if odd := sorted(set(self.setup) - READABLE):
            return f"its setup needs {', '.join(odd)}"
        if "scripted_tokens" in self.setup and self.script is None:
            return "its scripted tokens are told in words not known here"
        for words in self.setup.get("synth", {}).values():
            if isinstance(words, str) and picture(words) is None and "array" not in words:
                return f"its image is told in words not known here: {words}"
        return None


def load() -> list[Case]:
    rows = [json.loads(line) for line in FILE.read_text().splitlines() if line.strip()]
    return [
        Case(
            id=row["id"],
            area=row.get("area", ""),
            request=row["request"],
            expect=row["expect"],
            setup=row.get("setup") or {},
        )
        for row in rows
    ]


def repeat(text: str) -> str:
    return re.sub(r"\{\{repeat:(.*?):(\d+)\}\}", lambda m: m[1] * int(m[2]), text, flags=re.DOTALL)


@dataclass
class Fields:
    """A reply's choice, whichever way it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def same(self) -> tuple[Any, ...]:
        """What must not depend on streaming. Ids of calls are made anew each time."""
        calls = [(call["name"], call["arguments"]) for call in self.calls]
        return self.content, self.reasoning, calls, self.finish


@dataclass
class Answer:
    status: int
    headers: httpx.Headers
    text: str
    sent: dict[str, Any]

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line != "data: [DONE]"]

    @property
    def usage(self) -> dict[str, Any]:
        if not self.is_stream:
            return self.json["usage"]
        return next(chunk["usage"] for chunk in self.chunks if chunk.get("usage"))

    def choice(self, index: int = 0) -> Fields:
        return self._joined(index) if self.is_stream else self._whole(index)

    def _whole(self, index: int) -> Fields:
        choice = self.json["choices"][index]
        if "text" in choice:
            logprobs = choice.get("logprobs") or {}
            rows = [
                {"token": t, "logprob": p}
                for t, p in zip(
                    logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True
                )
            ]
            return Fields(content=choice["text"], finish=choice["finish_reason"], logprobs=rows)
        message = choice["message"]
        return Fields(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            calls=[
                call["function"] | {"id": call["id"]} for call in message.get("tool_calls") or ()
            ],
            finish=choice["finish_reason"],
            logprobs=(choice.get("logprobs") or {}).get("content") or [],
        )

    def _joined(self, index: int) -> Fields:
        joined = Fields()
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    _join(joined, choice)
        return joined


def _join(joined: Fields, choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    joined.content += delta.get("content") or ""
    joined.reasoning += delta.get("reasoning_content") or ""
    for piece in delta.get("tool_calls") or ():
        function = piece["function"]
        if piece["index"] == len(joined.calls):
            joined.calls.append({"id": piece["id"], "name": function["name"], "arguments": ""})
        joined.calls[piece["index"]]["arguments"] += function.get("arguments") or ""
    joined.logprobs += (choice.get("logprobs") or {}).get("content") or []
    joined.finish = choice["finish_reason"] or joined.finish


class Runner:
    """Sends cases to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.cases = {case.id: case for case in load()}
        self.client = httpx.Client(base_url=server.url, timeout=120.0)
        self.canary_port = 0
        self._answers: dict[str, Answer] = {}
        rows = self.client.get("/v1/models").json()["data"]
        self.context = next(row["max_model_len"] for row in rows if row["id"] == server.model)

    def close(self) -> None:
        self.client.close()

    def answer(self, name: str) -> Answer:
        """The answer to a case as the file tells it, asked for once."""
        if name not in self._answers:
            self._answers[name] = self.ask(self.cases[name])
        return self._answers[name]

    def ask(self, case: Case, **changes: Any) -> Answer:
        """Send a case's request with `changes` to its body."""
        request = case.request
        headers = {key: self.fill(value, case) for key, value in request.get("headers", {}).items()}
        if "raw_body" in request:
            return self.post(request["path"], self.fill(request["raw_body"], case), headers)
        if "{{repeat:x:200000000}}" in json.dumps(request["body"]):
            return self.announce(request["path"], HUGE * 2)
        body = self.fill_value(request["body"], case) | changes
        return self.post(request["path"], body | self._script(case, body), headers)

    def _script(self, case: Case, body: dict[str, Any]) -> dict[str, Any]:
        ids = case.script
        if ids is None:
            return {}
        script: dict[str, Any] = {"baton_script_ids": ids or [_TOKENIZER.end_of_msg]}
        count = max(1, len(ids))
        if case.ends_at_limit:
            # A script in words of one token each would end at the case's limit; ours ends there.
            if "scripted_tokens" in case.setup:
                script["baton_script_ids"], count = ids[:1], 1
            return script | {"baton_script_ends": "length", "max_tokens": count}
        return script | {"max_tokens": max(count + 1, body.get("max_tokens") or 0)}

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        content = body if isinstance(body, str) else json.dumps(body)
        kind = {"Content-Type": "application/json"}
        reply = self.client.post(path, content=content.encode(), headers=kind | (headers or {}))
        sent = body if isinstance(body, dict) else {}
        return Answer(reply.status_code, reply.headers, reply.text, sent)

    def announce(self, path: str, length: int) -> Answer:
        """Announce a body of `length` bytes, begin it, and read the answer."""

        place = self.client.base_url
        connection = http.client.HTTPConnection(place.host, place.port, timeout=30)
        try:
            connection.putrequest("POST", path)
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(length))
            connection.endheaders()
            connection.send(b'{"model": "' + b"x" * 65536)
            reply = connection.getresponse()
            headers = httpx.Headers(reply.getheaders())
            return Answer(reply.status, headers, reply.read().decode(), {})
        finally:
            connection.close()

    def say(self, text: str = "hi", **fields: Any) -> Answer:
        """A plain request."""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.server.model, "messages": messages, "max_tokens": 1} | fields
        return self.post("/v1/chat/completions", body)

    def fill_value(self, value: Any, case: Case) -> Any:
        """`value` with its placeholders filled; a placeholder alone may become any type."""
        if isinstance(value, dict):
            return {
                str(self.fill_value(key, case)): self.fill_value(item, case)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.fill_value(item, case) for item in value]
        if not isinstance(value, str):
            return value
        if match := re.fullmatch(r"\{\{(token_ids|token_ids_same):(\w+)\}\}", value):
            count = self._number(match[2])
            return [100 if match[1].endswith("same") else 32 + i % 90 for i in range(count)]
        if match := re.fullmatch(r"\{\{array:(\d+):(.*)\}\}", value):
            return [json.loads(match[2])] * int(match[1])
        if value in ("{{vocab_size}}", "{{plain_token_id}}"):
            return _TOKENIZER.vocab if "vocab" in value else _TOKENIZER.encode("a")[0]
        return self.fill(value, case)

    def fill(self, text: str, case: Case) -> str:
        def value(match: re.Match[str]) -> str:
            name, _, rest = match[1].partition(":")
            if name == "model":
                return self.server.model
            if name == "image":
                uri = picture(case.setup["synth"][rest])
                assert uri is not None
                return uri
            if name == "repeat":
                word, _, count = rest.rpartition(":")
                return word * self._number(count)
            if name == "vocab_size":
                return str(_TOKENIZER.vocab)
            if name == "plain_token_id":
                return str(_TOKENIZER.encode("a")[0])
            if name == "canary_port":
                return str(self.canary_port)
            return str(getattr(self.server, name))

        return re.sub(r"\{\{(.*?)\}\}", value, text, flags=re.DOTALL)

    def _number(self, text: str) -> int:
        words = {
            "context_limit": self.context,
            "context_limit_minus_1": self.context - 1,
            # every word of the template's frame counts too; half as many leave room for it
            "context_limit_minus_20_tokens": (self.context - 400) // 2,
        }
        return words[text] if text in words else int(text)

    def holdings(self) -> dict[str, int]:
        """Everything any room holds for requests, by room and kind; zeros are left out."""
        reply = httpx.get(f"{self.server.admin_url}/admin/inventory", timeout=10.0).json()
        kinds = ("pages", "slots", "quarantine", "embeddings", "tickets")
        held = {f"{r['room']} {k}": r[k] for r in reply["replicas"] for k in kinds if r[k]}
        return held | {f"{name} is silent": 1 for name in reply["silent"]}

    def resident_bytes(self) -> dict[str, int]:
        """What each process holds of the machine's memory, by room and replica."""
        text = httpx.get(f"{self.server.admin_url}/metrics", timeout=10.0).text
        found = re.findall(r"^baton_resident_bytes\{(.*?)\} (\S+)$", text, re.MULTILINE)
        return {labels: int(float(value)) for labels, value in found}

    def until_empty(self, within_s: float = 10.0) -> None:
        """Wait until no room holds anything for a request."""
        until = time.monotonic() + within_s
        while held := self.holdings():
            assert time.monotonic() < until, f"still held after {within_s:g} s: {held}"
            time.sleep(0.05)
