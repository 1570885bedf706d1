"""What `/v1/messages` gives back: the message, the events of a stream, and errors.

`type` is written first, always. A field with a default is left out while it has it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from router.schema.replies import Reply

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextOut(Reply, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingOut(Reply, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning. `signature` is a placeholder: reasoning is taken back as it is sent."""

    thinking: str
    signature: str


class ToolUseOut(Reply, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call; `input` is an object, digit for digit as the model wrote it."""

    id: str
    name: str
    input: msgspec.Raw | dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(Reply, frozen=True, kw_only=True):
    """Tokens. `input_tokens` are those that did not come from a cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(Reply, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Reply of `/v1/messages`; in `message_start`, its beginning."""

    id: str
    role: str
    model: str
    content: list[BlockOut]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TextDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="signature_delta"):
    """The end of reasoning."""

    signature: str


class InputDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments."""

    partial_json: str


class StopDelta(Reply, frozen=True, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(Reply, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """First event; goes out before any token exists."""

    message: MessageReply


class Ping(Reply, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """Says that the stream lives."""


class BlockStart(Reply, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: BlockOut


class BlockDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """A piece of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Reply, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class MessageDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """Why the message ended, and its usage from the beginning."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Reply, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """Last event."""


MessageEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
)


class CountReply(Reply, frozen=True, kw_only=True):
    """Reply of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageErrorOut(Reply, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessageErrorReply(Reply, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Body of a refused request, and the last event of a stream that broke."""

    error: MessageErrorOut
    request_id: str
