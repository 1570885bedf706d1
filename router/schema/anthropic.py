"""`/v1/messages` of Anthropic's API: the bodies' types. What is made of them: `anthropic_chat`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.schema.sampling import Count, Priority, Share

CHOICES = {
    re.compile(r"messages\[\d+\]\.role$"): "user, assistant or system",
    re.compile(r"\.content\[\d+\]\.content\[\d+\]\.type$"): "text or image",
    re.compile(r"\.content\[\d+\]\.type$"): (
        "text, image, tool_use, tool_result, thinking or redacted_thinking"
    ),
    re.compile(r"system\[\d+\]\.type$"): "text",
    re.compile(r"\.source\.type$"): "base64 or url",
    re.compile(r"\.source\.media_type$"): (
        "image/png, image/jpeg, image/webp, image/gif or image/bmp"
    ),
    re.compile(r"^thinking\.type$"): "enabled, adaptive or disabled",
    re.compile(r"^tool_choice\.type$"): "auto, any, tool or none",
    re.compile(r"^output_config\.effort$"): "low, medium, high, xhigh or max",
    re.compile(r"^output_config\.format\.type$"): "json_schema",
}


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class Base64Source(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    """An image's bytes. What they are is read from them, whatever type is told."""

    data: str
    media_type: Literal[
        "image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp"
    ] = "image/png"


class UrlSource(msgspec.Struct, frozen=True, tag_field="type", tag="url"):
    """An image's address."""

    url: str


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image in a user's message or a tool's result."""

    source: Base64Source | UrlSource


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier reply. The signature is not looked at."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning nobody can read; passed over."""

    data: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call the assistant made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What a call gave. `is_error` matters only when there is no content."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class MessageIn(msgspec.Struct, frozen=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolIn(msgspec.Struct, frozen=True):
    """A tool of the client's. Tools that the server would run are not offered."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoiceIn(msgspec.Struct, frozen=True):
    """Whether to call, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingIn(msgspec.Struct, frozen=True):
    """Whether to think; the budget chooses an effort."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class FormatIn(msgspec.Struct, frozen=True):
    """The schema that the answer must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: FormatIn | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[MessageIn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoiceIn | None = None
    thinking: ThinkingIn | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    metadata: dict[str, Any] | None = None
