"""A conversation to token ids in K3's message format, segment by segment.

Control tokens come from this file alone: every piece of text, name or attribute is encoded on its
own as ordinary text, so nothing a client writes can open or close a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.contract.messages import ImageRef
from common.errors import InvalidRequest
from router.prompt.tokenizer import Tokenizer
from router.schema.chat import ResponseFormat
from router.schema.messages import (
    AssistantMessage,
    DeveloperMessage,
    ImagePart,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Turn,
    call_arguments,
)

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
CHOICES = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

Attributes = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt. Rows of `images[i]` start at `image_offsets[i]` in `token_ids`."""

    token_ids: tuple[int, ...]
    images: tuple[ImageRef, ...]
    image_offsets: tuple[int, ...]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Turn],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = True,
    effort: str = "max",
    tool_choice: str = "auto",
    response_format: ResponseFormat | None = None,
    images: Sequence[ImageRef] = (),
    generate: bool = True,
) -> Prompt:
    """Render arranged messages.

    Args:
        tokenizer: the checkpoint's.
        messages: in the prompt's order, as `parse_chat` leaves them.
        tools: declared tools, as they were sent.
        thinking: whether think channels exist, in history too.
        effort: low, high or max.
        tool_choice: auto, none or required; told to the model only beside tools.
        response_format: form of the answer, if the request asks for one.
        images: one for every image part, in order of appearance.
        generate: whether the prompt ends inside the assistant's next message.

    Raises:
        InvalidRequest: a schema or a tool is nested too deeply to be written.
        ValueError: the number of images is not that of the image parts.
    """
    page = _Page(tokenizer, images, thinking)
    if tools:
        page.system("tool-declare", TOOLS.format(_canonical(tools, "tools")))
    if thinking:
        page.system("thinking-effort", EFFORT.format(effort))
    for message in messages:
        page.turn(message)
    if tools and (rule := CHOICES.get(tool_choice)):
        page.system(
            "tool-choice", f"The system is invoked with `tool_choice={tool_choice}`.\n{rule}"
        )
    if response_format is not None:
        page.system("response-format", _form(response_format))
    if generate:
        page.open("message", (("role", "assistant"),))
        page.open("think" if thinking else "response")
    return page.prompt()


def _form(wanted: ResponseFormat) -> str:
    text = f"The system is invoked with `response_format={wanted.type}`.\n{RAW_JSON}"
    if wanted.json_schema is None:
        return text
    return text + SCHEMA.format(_canonical(wanted.json_schema.schema, "response_format"))


def _canonical(value: object, param: str) -> str:
    """JSON with sorted keys, without spaces, beyond ASCII as it is."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param=param) from None


def json_type(value: object) -> str:
    """The `type` attribute of an argument."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


class _Page:
    """The ids written so far."""

    def __init__(self, tokenizer: Tokenizer, images: Sequence[ImageRef], thinking: bool) -> None:
        self._t = tokenizer
        self._ids: list[int] = []
        self._images = tuple(images)
        self._offsets: list[int] = []
        self._thinking = thinking

    def prompt(self) -> Prompt:
        if len(self._offsets) != len(self._images):
            raise ValueError(f"{len(self._images)} images for {len(self._offsets)} image parts")
        return Prompt(
            token_ids=tuple(self._ids), images=self._images, image_offsets=tuple(self._offsets)
        )

    def text(self, text: str) -> None:
        self._ids += self._t.encode(text)

    def open(self, name: str, attributes: Attributes = ()) -> None:
        self._ids.append(self._t.open)
        self.text(name)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self._ids.append(self._t.sep)

    def close(self, name: str) -> None:
        self._ids.append(self._t.close)
        self.text(name)
        self._ids.append(self._t.sep)

    def end(self) -> None:
        self.close("message")
        self._ids.append(self._t.end_of_msg)

    def system(self, kind: str, body: str) -> None:
        self.open("message", (("role", "system"), ("type", kind)))
        self.text(body)
        self.end()

    def turn(self, message: Turn) -> None:
        if isinstance(message, AssistantMessage):
            self._assistant(message)
            return
        if isinstance(message, SystemMessage | DeveloperMessage) and message.tools:
            self.system("tool-declare", MORE_TOOLS.format(_canonical(message.tools, "messages")))
            return
        self.open("message", _attributes(message))
        self._content(message.content)
        self.end()

    def _content(self, content: str | Iterable[TextPart | RefusalPart | ImagePart] | None) -> None:
        if content is None or isinstance(content, str):
            self.text(content or "")
            return
        for part in content:  # the release encodes every part on its own, without a separator
            if isinstance(part, ImagePart):
                self._image()
            else:
                self.text(part.text if isinstance(part, TextPart) else part.refusal)

    def _image(self) -> None:
        if len(self._offsets) == len(self._images):
            raise ValueError(f"more image parts than the {len(self._images)} images given")
        image = self._images[len(self._offsets)]
        self._ids.append(self._t.media_begin)
        self.text(f"image {image.width}x{image.height}")
        self._ids.append(self._t.media_content)
        self._offsets.append(len(self._ids))
        self._ids += [self._t.media_pad] * image.tokens
        self._ids.append(self._t.media_end)

    def _assistant(self, message: AssistantMessage) -> None:
        self.open("message", _named("assistant", message.name))
        if self._thinking:
            self.open("think")
            self.text(message.thoughts)
            self.close("think")
        self.open("response")
        self._content(message.content)
        self.close("response")
        if message.tool_calls:
            self.open("tools")
            for index, call in enumerate(message.tool_calls, 1):
                self._call(index, call)
            self.close("tools")
        self.end()

    def _call(self, index: int, call: ToolCall) -> None:
        self.open("call", (("tool", call.function.name), ("index", str(index))))
        raw = call.function.arguments or ""
        arguments = call_arguments(raw)
        if isinstance(arguments, dict):
            for key, value in arguments.items():
                kind = json_type(value)
                self.open("argument", (("key", key), ("type", kind)))
                self.text(
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                )
                self.close("argument")
        else:
            self.open("json", (("type", "object"),))
            self.text(raw)
            self.close("json")
        self.close("call")


def _attributes(message: Turn) -> Attributes:
    if isinstance(message, ToolResult):
        return (("role", "tool"), ("tool", message.tool), ("index", str(message.index)))
    if isinstance(message, SystemMessage | DeveloperMessage):
        return _named("system", message.name)
    return _named("user", message.name)


def _named(role: str, name: str | None) -> Attributes:
    return (("role", role), ("name", name)) if name else (("role", role),)
