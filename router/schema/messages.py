"""The messages of a conversation: their types, and the order in which a prompt tells them.

Tool results may arrive in any order; `arrange` puts them into the order of the calls they answer,
so that every later reader (images, template) meets them as the prompt does. Nothing is rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common.errors import InvalidRequest
from router.schema.json_text import read_json


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text. Neighbouring pieces are joined without anything between them."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """An assistant's refusal, read as text."""

    refusal: str


class ImageUrl(msgspec.Struct, frozen=True):
    """Where an image is. `detail` is accepted and has no effect."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image in a user's message or a tool's result."""

    image_url: ImageUrl | str

    @property
    def url(self) -> str:
        """The image's data URI or address."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class FunctionCall(msgspec.Struct, frozen=True):
    """Name and arguments (a JSON object as text) of a call."""

    name: str
    arguments: str | None = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call the assistant made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


Texts = str | list[TextPart] | None


class SystemMessage(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    """Instructions; or, with `tools`, further tools from here on."""

    content: Texts = None
    name: str | None = None
    tools: list[dict[str, Any]] | None = None


class DeveloperMessage(msgspec.Struct, frozen=True, tag_field="role", tag="developer"):
    """The newer name of a system message."""

    content: Texts = None
    name: str | None = None
    tools: list[dict[str, Any]] | None = None


class UserMessage(msgspec.Struct, frozen=True, tag_field="role", tag="user"):
    """What the person says and shows."""

    content: str | list[TextPart | ImagePart]
    name: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    """An earlier reply, as it was given out."""

    content: str | list[TextPart | RefusalPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same
    tool_calls: list[ToolCall] | None = None
    name: str | None = None

    @property
    def thoughts(self) -> str:
        """The reply's reasoning under either name; empty when it is blank."""
        text = self.reasoning_content or self.reasoning or ""
        return text if text.strip() else ""


class ToolMessage(msgspec.Struct, frozen=True, tag_field="role", tag="tool"):
    """The result of a call, as it is sent."""

    tool_call_id: str
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result beside the call it answers: the tool's name, its place from 1 in the message."""

    tool: str
    index: int
    position: int  # in the request's messages
    content: str | list[TextPart | ImagePart] | None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Turn = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolResult


def arrange(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Put each run of tool results into the order of their calls, and name the calls they answer.

    Raises:
        InvalidRequest: a result answers no earlier call or one already answered, or a call's
            arguments are JSON but not an object; `param` names the message.
    """
    calls: dict[str, tuple[int, int, str]] = {}  # id -> (calling message, index from 1, tool)
    answered: set[str] = set()
    arranged: list[Turn] = []
    results: list[tuple[tuple[int, int], ToolResult]] = []
    for position, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            results.append(_match(message, position, calls, answered))
            continue
        arranged += [result for _, result in sorted(results, key=lambda item: item[0])]
        results = []
        if isinstance(message, AssistantMessage):
            _note_calls(message, position, calls, answered)
        arranged.append(message)
    arranged += [result for _, result in sorted(results, key=lambda item: item[0])]
    if all(isinstance(turn, AssistantMessage | ToolResult) for turn in arranged):
        raise InvalidRequest(
            "`messages` needs at least one user or system message", param="messages"
        )
    return tuple(arranged)


def _note_calls(
    message: AssistantMessage,
    position: int,
    calls: dict[str, tuple[int, int, str]],
    answered: set[str],
) -> None:
    for index, call in enumerate(message.tool_calls or (), 1):
        where = f"messages[{position}].tool_calls[{index - 1}]"
        if not call.function.name:
            raise InvalidRequest(
                f"`{where}.function.name` is empty", param=f"{where}.function.name"
            )
        if isinstance(call_arguments(call.function.arguments or ""), list):
            param = f"{where}.function.arguments"
            raise InvalidRequest(f"`{param}` must be a JSON object", param=param)
        calls[call.id] = (position, index, call.function.name)
        answered.discard(call.id)  # an id used again belongs to the later call


def _match(
    message: ToolMessage, position: int, calls: dict[str, tuple[int, int, str]], answered: set[str]
) -> tuple[tuple[int, int], ToolResult]:
    param = f"messages[{position}].tool_call_id"
    if message.tool_call_id not in calls:
        raise InvalidRequest(
            f"`{param}` answers no earlier tool call of the conversation", param=param
        )
    if message.tool_call_id in answered:
        raise InvalidRequest(f"`{param}` was answered by an earlier message already", param=param)
    answered.add(message.tool_call_id)
    calling, index, tool = calls[message.tool_call_id]
    return (calling, index), ToolResult(
        tool=tool, index=index, position=position, content=message.content
    )


def call_arguments(text: str) -> dict[str, Any] | str | list[Any]:
    """A call's arguments: an object; the text when it is not JSON; a list around other JSON."""
    if not text.strip():
        return {}
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Where an image of a request comes from, and which field of the body says so."""

    url: str
    param: str


def image_sources(messages: Sequence[Turn]) -> list[ImageSource]:
    """Every image of arranged messages, in the order in which the prompt meets them."""
    sources = []
    for position, message in enumerate(messages):
        sent = message.position if isinstance(message, ToolResult) else position
        parts = message.content if isinstance(message.content, list) else ()
        for index, part in enumerate(parts):
            if isinstance(part, ImagePart):
                param = f"messages[{sent}].content[{index}].image_url"
                sources.append(ImageSource(url=part.url, param=param))
    return sources
