"""What `/v1/responses` gives back: the response with its items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from router.schema.replies import Reply

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputTextOut(Reply, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningTextOut(Reply, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning, whole."""

    text: str


class MessageOutItem(Reply, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The answer's text."""

    id: str
    status: Status
    role: str
    content: list[OutputTextOut]


class ReasoningOutItem(Reply, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The answer's reasoning. There is no summary: the text itself is given out."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningTextOut]


class CallOutItem(Reply, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


ItemOut = MessageOutItem | ReasoningOutItem | CallOutItem


class InputDetails(Reply, frozen=True, kw_only=True):
    """Of the prompt's tokens: how many came from a cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Reply, frozen=True, kw_only=True):
    """Of the answer's tokens: how many were reasoning."""

    reasoning_tokens: int


class ResponseUsage(Reply, frozen=True, kw_only=True):
    """Tokens of the request, each counted once."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFault(Reply, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(Reply, frozen=True, kw_only=True):
    """Why a response is not whole."""

    reason: str


class ResponseReply(Reply, frozen=True, kw_only=True):
    """Reply of `/v1/responses`; what the request asked for is repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: ResponseFault | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ItemOut]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]


class Numbered(Reply, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events: they are numbered from 0."""

    sequence_number: int


class Created(Numbered, frozen=True, kw_only=True, tag="response.created"):
    """First event."""

    response: ResponseReply


class InProgress(Numbered, frozen=True, kw_only=True, tag="response.in_progress"):
    """The request has a place."""

    response: ResponseReply


class Completed(Numbered, frozen=True, kw_only=True, tag="response.completed"):
    """Last event of a whole response."""

    response: ResponseReply


class EndedIncomplete(Numbered, frozen=True, kw_only=True, tag="response.incomplete"):
    """Last event of a response that the token limit cut off."""

    response: ResponseReply


class Failed(Numbered, frozen=True, kw_only=True, tag="response.failed"):
    """Last event of a response that could not be finished."""

    response: ResponseReply


class ItemAdded(Numbered, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: ItemOut


class ItemDone(Numbered, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: ItemOut


class OfItem(Numbered, frozen=True, kw_only=True):
    """Base of events about an item."""

    item_id: str
    output_index: int


class PartAdded(OfItem, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part of an item begins, empty."""

    content_index: int
    part: OutputTextOut | ReasoningTextOut


class PartDone(OfItem, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part of an item is whole."""

    content_index: int
    part: OutputTextOut | ReasoningTextOut


class TextMore(OfItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    content_index: int
    delta: str
    logprobs: list[Any]


class TextDone(OfItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The text is whole."""

    content_index: int
    text: str
    logprobs: list[Any]


class ReasoningMore(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    content_index: int
    delta: str


class ReasoningDone(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The reasoning is whole."""

    content_index: int
    text: str


class ArgumentsMore(
    OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """A call's arguments are whole."""

    name: str
    arguments: str


ResponseEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextMore
    | TextDone
    | ReasoningMore
    | ReasoningDone
    | ArgumentsMore
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | EndedIncomplete
    | Failed
)
