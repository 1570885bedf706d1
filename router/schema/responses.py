"""`/v1/responses`, the stateless part: the body's type. What is made of it: `responses_chat`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.schema.sampling import Count, Priority, Share

CHOICES = {
    re.compile(r"^input\[\d+\]\.type$"): (
        "message, function_call, function_call_output or reasoning; "
        "nothing is kept here that an item could refer to"
    ),
    re.compile(r"^input\[\d+\]\.role$"): "user, assistant, system or developer",
    re.compile(r"^input\[\d+\]\.(content|output)\[\d+\]\.type$"): (
        "input_text, input_image, output_text or refusal"
    ),
    re.compile(r"^text\.format\.type$"): "text, json_object or json_schema",
}


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text from the client."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str


class Refusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """An earlier refusal, read as text."""

    refusal: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image, as data URI or address. `detail` has no effect; files are not kept here."""

    image_url: str
    detail: str | None = None


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message. Its `type` may be missing."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal | InputImage]


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call the assistant made."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """What a call gave."""

    call_id: str
    output: str | list[InputText | InputImage]


class ReasoningText(msgspec.Struct, frozen=True):
    """A piece of reasoning, or of its summary."""

    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer: its text, or else its summary."""

    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, frozen=True):
    """A function of the client's. Tools that the server would run are not offered."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True):
    """The function that must be called."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """About the answer's text. `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    """How much to think. Reasoning is given out whole, so `summary` has no effect."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/responses`."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    priority: Priority | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
