"""A body of Anthropic's `/v1/messages` as a chat request: turns, tools, thinking, form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.schema.anthropic import (
    CHOICES,
    Base64Source,
    Block,
    CountBody,
    ImageBlock,
    MessageIn,
    MessagesBody,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoiceIn,
    ToolIn,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from router.schema.decoding import convert_object, decode_object, unknown_fields
from router.schema.limits import RequestLimits
from router.schema.translation import Translated, Words, check_translated

REFUSED = {
    "mcp_servers": "declare tools and answer their calls",
    "container": "this server runs no code for a client",
    "prefill": "an answer cannot be begun for the model",
}
NAMES = {  # of a chat, and of this API
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format(\.json_schema)?": "output_config.format",
    r"`stop`": "`stop_sequences`",
    r"^stop$": "stop_sequences",
}
# Up to how many tokens of budget each effort reaches; beyond the last it is max.
BUDGETS = ((4096, "low"), (16384, "high"))


BY_ROLE: dict[str, tuple[type, ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def parse_messages(body: bytes, limits: RequestLimits) -> Translated:
    """Read and check a request for a message.

    Raises:
        InvalidRequest: what is wrong, with the field's path as `param`.
        NotFound: the model is not served here.
    """
    raw = decode_object(body)
    asked = convert_object(raw, MessagesBody, CHOICES)
    fields = {
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stream": asked.stream,
        "priority": asked.priority,
    }
    ignored = unknown_fields(raw, MessagesBody) + (("metadata",) if asked.metadata else ())
    return _translated(raw, asked, fields, ignored, limits)


def parse_count(body: bytes, limits: RequestLimits) -> Translated:
    """Read and check a request whose tokens are only counted.

    Raises:
        InvalidRequest: what is wrong, with the field's path as `param`.
        NotFound: the model is not served here.
    """
    raw = decode_object(body)
    asked = convert_object(raw, CountBody, CHOICES)
    return _translated(raw, asked, {}, unknown_fields(raw, CountBody), limits)


def _translated(
    raw: dict[str, Any],
    asked: CountBody,
    fields: dict[str, Any],
    ignored: tuple[str, ...],
    limits: RequestLimits,
) -> Translated:
    for name, remedy in REFUSED.items():
        if raw.get(name):
            raise InvalidRequest(f"`{name}` is not supported: {remedy}", param=name)
    if asked.messages[-1].role == "assistant":
        raise InvalidRequest(
            "`messages` end with the assistant: an answer cannot be begun for the model; "
            "end them with the user",
            param="messages",
        )
    told = _Turns()
    if asked.system:
        told.add("system", role="system", content=_parts(asked.system))
    for index, message in enumerate(asked.messages):
        _take_message(told, message, f"messages[{index}]")
    choice = asked.tool_choice
    thinking, effort = _thinking(asked)
    fields |= {
        "model": asked.model,
        "messages": told.messages,
        "tools": [_tool(tool, index) for index, tool in enumerate(asked.tools or ())] or None,
        "tool_choice": _choice(choice) if choice else None,
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "reasoning_effort": effort,
        "response_format": _format(asked.output_config),
    }
    return check_translated(fields, told.words(), raw=raw, ignored=ignored, limits=limits)


class _Turns:
    """The chat's messages so far, each with its place in the body."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.parts: list[tuple[str, ...]] = []

    def add(self, place: str, *, parts: Sequence[str] = (), **fields: Any) -> None:
        self.messages.append({k: v for k, v in fields.items() if v is not None})
        self.places.append(place)
        self.parts.append(tuple(parts))

    def words(self) -> Words:
        return Words(
            places=tuple(self.places),
            parts=tuple(self.parts),
            names=NAMES,
            call_id="tool_use_id",
        )


def _take_message(told: _Turns, message: MessageIn, place: str) -> None:
    if isinstance(message.content, str):
        told.add(place, role=message.role, content=message.content)
        return
    for index, block in enumerate(message.content):
        if not isinstance(block, BY_ROLE[message.role]):
            tag = block.__struct_config__.tag
            param = f"{place}.content[{index}].type"
            raise InvalidRequest(
                f"`{param}` is {tag}, which does not belong in a message of role {message.role}",
                param=param,
            )
    if message.role == "assistant":
        _take_assistant(told, message.content, place)
    elif message.role == "system":
        told.add(place, role="system", content=_parts(message.content))
    else:
        _take_user(told, message.content, place)


def _take_user(told: _Turns, blocks: Sequence[Block], place: str) -> None:
    """A user's blocks; each tool result becomes a message, what stands between them another."""
    own: dict[str, Block] = {}  # by place
    for index, block in enumerate(blocks):
        here = f"{place}.content[{index}]"
        if not isinstance(block, ToolResultBlock):
            own[here] = block
            continue
        if own:
            told.add(place, parts=list(own), role="user", content=_parts(list(own.values())))
            own = {}
        content = block.content if isinstance(block.content, str) else _parts(block.content or ())
        told.add(
            here,
            parts=[f"{here}.content[{i}]" for i in range(len(content))],
            role="tool",
            tool_call_id=block.tool_use_id,
            content=content or ("error" if block.is_error else ""),
        )
    if own or not blocks:
        told.add(place, parts=list(own), role="user", content=_parts(list(own.values())))


def _take_assistant(told: _Turns, blocks: Sequence[Block], place: str) -> None:
    calls = [
        {"id": b.id, "function": {"name": b.name, "arguments": _written(b.input)}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    told.add(
        place,
        role="assistant",
        content="".join(b.text for b in blocks if isinstance(b, TextBlock)),
        reasoning_content="".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock)),
        tool_calls=calls or None,
    )


def _parts(content: str | Sequence[Block]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": b.text}
        if isinstance(b, TextBlock)
        else {"type": "image_url", "image_url": {"url": _url(b.source)}}
        for b in content
        if isinstance(b, TextBlock | ImageBlock)
    ]


def _url(source: Base64Source | UrlSource) -> str:
    return source.url if isinstance(source, UrlSource) else f"data:;base64,{source.data}"


def _tool(tool: ToolIn, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        param = f"tools[{index}].type"
        raise InvalidRequest(
            f"`{param}` is {tool.type[:40]!r}: tools that the server runs are not offered; "
            "declare a custom tool",
            param=param,
        )
    spec = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {k: v for k, v in spec.items() if v is not None}}


def _choice(choice: ToolChoiceIn) -> str | dict[str, Any]:
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if not choice.name:
        raise InvalidRequest(
            "`tool_choice.name` is required with the type tool", param="tool_choice.name"
        )
    return {"type": "function", "function": {"name": choice.name}}


def _thinking(asked: CountBody) -> tuple[bool, str | None]:
    """Whether to think (not unless asked to, as this API has it), and with which effort."""
    effort: str | None = asked.output_config.effort if asked.output_config else None
    if asked.thinking is None or asked.thinking.type == "disabled":
        return False, effort
    budget = asked.thinking.budget_tokens
    if effort is None and budget is not None:
        effort = next((name for most, name in BUDGETS if budget <= most), "max")
    return True, effort


def _format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    schema = {"name": "answer", "schema": config.format.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _written(arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("`messages` hold an `input` that is nested too deeply") from None
