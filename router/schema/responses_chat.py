"""A body of `/v1/responses` as a chat request: items to messages, and what cannot be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.schema.decoding import convert_object, decode_object, unknown_fields
from router.schema.limits import RequestLimits
from router.schema.responses import (
    CHOICES,
    CallItem,
    CallOutputItem,
    FunctionChoice,
    FunctionTool,
    InputImage,
    Item,
    MessageItem,
    ReasoningItem,
    Refusal,
    ResponsesBody,
    TextFormat,
)
from router.schema.translation import Translated, Words, check_translated

REFUSED = {
    "previous_response_id": "responses are not kept; send the earlier items in `input`",
    "conversation": "conversations are not kept; send the earlier items in `input`",
    "prompt": "prompt templates are not kept; send `instructions` and `input`",
    "background": "responses are not kept; stream, or wait",
    "top_logprobs": "ask /v1/chat/completions for logprobs",
}
LOGPROBS = "message.output_text.logprobs"
NAMES = {  # of a chat, and of this API
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format(\.json_schema)?": "text.format",
    r"reasoning_effort": "reasoning.effort",
    r"^messages$": "input",
    r"`messages`": "`input`",
}


def parse_response(body: bytes, limits: RequestLimits) -> Translated:
    """Read and check a request for a response.

    Raises:
        InvalidRequest: what is wrong, with the field's path as `param`.
        NotFound: the model is not served here.
    """
    raw = decode_object(body)
    _check_refused(raw)
    asked = convert_object(_with_types(raw), ResponsesBody, CHOICES)
    told = _Turns()
    if asked.instructions:
        told.add("instructions", role="system", content=asked.instructions)
    if isinstance(asked.input, str):
        told.add("input", role="user", content=asked.input)
    else:
        for index, item in enumerate(asked.input):
            told.take(f"input[{index}]", item)
    told.end_turn()
    fields = {
        "model": asked.model,
        "messages": told.messages,
        "tools": [_tool(tool, index) for index, tool in enumerate(asked.tools or ())] or None,
        "tool_choice": _choice(asked.tool_choice),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "max_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "response_format": _format(asked.text.format if asked.text else None),
        "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
        "stream": asked.stream,
        "priority": asked.priority,
    }
    words = Words(places=tuple(told.places), parts=told.parts(), names=NAMES)
    ignored = unknown_fields(raw, ResponsesBody) + tuple(n for n in ("store", "user") if n in raw)
    return check_translated(fields, words, raw=raw, ignored=ignored, limits=limits)


def _check_refused(raw: dict[str, Any]) -> None:
    for name, remedy in REFUSED.items():
        if raw.get(name):
            raise InvalidRequest(f"`{name}` is not supported: {remedy}", param=name)
    include = raw.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        raise InvalidRequest(
            f"`include` asks for {LOGPROBS}: ask /v1/chat/completions for logprobs", param="include"
        )


def _with_types(raw: dict[str, Any]) -> dict[str, Any]:
    """The body with the type of messages written out, which clients may leave out."""
    items = raw.get("input")
    if not isinstance(items, list):
        return raw
    typed = [
        {"type": "message"} | item
        if isinstance(item, dict) and "role" in item and "type" not in item
        else item
        for item in items
    ]
    return raw | {"input": typed}


class _Turns:
    """The chat's messages so far; reasoning, text and calls of one answer are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._turn: dict[str, Any] = {}
        self._place = ""

    def add(self, place: str, **fields: Any) -> None:
        self.end_turn()
        self.messages.append(fields)
        self.places.append(place)

    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Where each part of a message's content came from."""
        return tuple(
            tuple(
                f"{place}.{'output' if m['role'] == 'tool' else 'content'}[{i}]" for i in range(n)
            )
            if isinstance(m.get("content"), list) and (n := len(m["content"]))
            else ()
            for m, place in zip(self.messages, self.places, strict=True)
        )

    def end_turn(self) -> None:
        turn, self._turn = self._turn, {}
        if turn:
            self.add(self._place, role="assistant", **turn)

    def take(self, place: str, item: Item) -> None:
        match item:
            case ReasoningItem():
                self._open(place, ends_before=("content", "tool_calls"))
                text = _thoughts(item)
                self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + text
            case MessageItem(role="assistant"):
                self._open(place, ends_before=("content", "tool_calls"))
                self._turn["content"] = _parts(item.content)
            case CallItem():
                self._open(place, ends_before=())
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                self._turn.setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                content = _parts(item.output)
                self.add(place, role="tool", tool_call_id=item.call_id, content=content)
            case MessageItem():
                self.add(place, role=item.role, content=_parts(item.content))

    def _open(self, place: str, *, ends_before: Sequence[str]) -> None:
        if any(name in self._turn for name in ends_before):
            self.end_turn()
        if not self._turn:
            self._place = place


def _thoughts(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    return "\n\n".join(part.text for part in item.summary or ())


def _parts(content: str | list[Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputImage):
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
        else:
            text = part.refusal if isinstance(part, Refusal) else part.text
            parts.append({"type": "text", "text": text})
    return parts


def _tool(tool: FunctionTool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        param = f"tools[{index}].type"
        raise InvalidRequest(
            f"`{param}` is {tool.type[:40]!r}; only functions of the client's own are offered",
            param=param,
        )
    if tool.name is None:
        raise InvalidRequest(f"`tools[{index}].name` is required", param=f"tools[{index}].name")
    spec = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {k: v for k, v in spec.items() if v is not None}}


def _choice(choice: str | FunctionChoice | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, FunctionChoice):
        return choice
    if choice.type != "function" or choice.name is None:
        raise InvalidRequest(
            "`tool_choice` must be auto, none, required, or "
            '{"type": "function", "name": the function}',
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice.name}}


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type} if wanted else None
    if wanted.schema is None:
        raise InvalidRequest(
            "`text.format.schema` is required with the type json_schema", param="text.format.schema"
        )
    schema = {
        "name": wanted.name,
        "schema": wanted.schema,
        "strict": wanted.strict,
        "description": wanted.description,
    }
    return {"type": "json_schema", "json_schema": schema}
