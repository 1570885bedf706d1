"""Declared tools and the choice among them: types and checks, no rendering."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.errors import InvalidRequest
from router.schema.decoding import convert_object
from router.schema.limits import RequestLimits
from router.schema.messages import DeveloperMessage, SystemMessage, Turn

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,128}")


class FunctionSpec(msgspec.Struct, frozen=True):
    """A tool the model may call. No `parameters` means no arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """One entry of `tools`."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    """The tool that must be called."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """`tool_choice` that names a tool."""

    function: NamedFunction
    type: Literal["function"] = "function"


def check_tools(
    tools: Sequence[Tool] | None,
    raw: dict[str, Any],
    messages: Sequence[Turn],
    limits: RequestLimits,
) -> tuple[dict[str, Any], ...]:
    """The body's tools as they were sent, once their names are sound.

    Raises:
        InvalidRequest: too many, a bad or repeated name, or tools beside a message's text.
    """
    if len(tools or ()) > limits.max_tools:
        raise InvalidRequest(f"`tools` has more than {limits.max_tools} entries", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools or ()):
        param, name = f"tools[{index}].function.name", tool.function.name
        if not _TOOL_NAME.fullmatch(name):
            rule = "1 to 128 letters, digits or any of _ . : / -"
            raise InvalidRequest(f"`{param}` is {name[:40]!r}; it must be {rule}", param=param)
        if name in seen:
            raise InvalidRequest(f"`{param}` repeats the name {name!r}", param=param)
        seen.add(name)
    for index, message in enumerate(messages):
        if isinstance(message, SystemMessage | DeveloperMessage) and message.tools:
            convert_object({"tools": message.tools}, _ToolList)
            if message.content:
                param = f"messages[{index}].content"
                raise InvalidRequest(
                    f"`{param}` cannot stand beside `tools`; send two messages", param=param
                )
    return tuple(raw.get("tools") or ())


class _ToolList(msgspec.Struct):
    tools: list[Tool]


def check_choice(
    choice: str | NamedChoice | None, tools: Sequence[dict[str, Any]]
) -> tuple[str, str | None]:
    """Auto, none or required, and the tool that was named if any.

    Raises:
        InvalidRequest: an unknown word, a name that is not declared, or nothing to call.
    """
    if choice is None or choice in ("auto", "none"):
        return ("none" if choice == "none" else "auto"), None
    if isinstance(choice, str) and choice != "required":
        raise InvalidRequest(
            f"`tool_choice` is {choice[:40]!r}; it must be auto, none, required or name a function",
            param="tool_choice",
        )
    if not tools:
        raise InvalidRequest(
            "`tool_choice` asks for a call, but `tools` is empty", param="tool_choice"
        )
    if isinstance(choice, str):
        return "required", None
    names = [tool["function"]["name"] for tool in tools]
    if choice.function.name not in names:
        raise InvalidRequest(
            f"`tool_choice` names {choice.function.name[:40]!r}, which is not among `tools`",
            param="tool_choice",
        )
    return "required", choice.function.name
