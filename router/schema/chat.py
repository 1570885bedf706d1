"""`/v1/chat/completions`: the body's type, and the checked request made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.contract.messages import Sampling
from common.errors import InvalidRequest
from router.schema.decoding import convert_object, decode_object, unknown_fields
from router.schema.limits import RequestLimits
from router.schema.messages import (
    DeveloperMessage,
    Message,
    SystemMessage,
    Turn,
    arrange,
    image_sources,
)
from router.schema.sampling import (
    Count,
    SamplingBody,
    Script,
    ScriptFields,
    check_model,
    check_refused,
    includes_usage,
    stop_strings,
    to_sampling,
    to_script,
)
from router.schema.tools import NamedChoice, Tool, check_choice, check_tools

# The model knows low, high and max. Other clients' words are mapped, `none` turns thinking off.
EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


class JsonSchema(msgspec.Struct, frozen=True):
    """A named schema that the answer must follow."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Form of the answer: free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another form of the answer: exactly one of these."""

    regex: str | None = None
    grammar: str | None = None
    json: dict[str, Any] | None = None
    choice: list[str] | None = None


class ThinkingSwitch(msgspec.Struct, frozen=True):
    """`thinking`, as some clients send it."""

    type: Literal["enabled", "disabled"]


class TemplateSwitches(msgspec.Struct, frozen=True):
    """`chat_template_kwargs`: either name switches thinking; others are passed over."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: str | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: TemplateSwitches | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked request: messages in the prompt's order, `tools` as they were sent."""

    model: str
    messages: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...]
    tool_choice: str  # auto, none or required; a named choice is required
    named_tool: str | None
    parallel_tool_calls: bool
    response_format: ResponseFormat | None  # None for free text
    structured_outputs: StructuredOutputs | None
    thinking: bool
    effort: str  # low, high or max
    sampling: Sampling  # `fit_sampling` settles max_tokens, `script_ids` the script
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    priority: int
    script: Script | None
    ignored: tuple[str, ...]  # fields of the body that had no effect

    @property
    def delivers_tools(self) -> bool:
        """Whether calls the model makes are given out."""
        declared = bool(self.tools) or any(
            isinstance(message, SystemMessage | DeveloperMessage) and message.tools
            for message in self.messages
        )
        return declared and self.tool_choice != "none"


def parse_chat(body: bytes, limits: RequestLimits) -> ChatRequest:
    """Read and check a chat request.

    Raises:
        InvalidRequest: what is wrong, with the field's path as `param`.
        NotFound: the model is not served here.
    """
    return check_chat(decode_object(body), limits)


def check_chat(raw: dict[str, Any], limits: RequestLimits) -> ChatRequest:
    """Check a chat request that is parsed already, or was made of another API's words.

    Raises:
        InvalidRequest: what is wrong, with the field's path as `param`.
        NotFound: the model is not served here.
    """
    check_refused(raw)
    chat = convert_object(raw, ChatBody)
    check_model(chat.model, limits)
    messages = arrange(chat.messages)
    _check_images(messages, limits)
    tools = check_tools(chat.tools, raw, messages, limits)
    choice, named = check_choice(chat.tool_choice, tools)
    thinking, effort = _thinking(chat)
    script = to_script(convert_object(raw, ScriptFields), limits.vocab) if limits.scripted else None
    return ChatRequest(
        model=chat.model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        named_tool=named,
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        response_format=_response_format(chat),
        structured_outputs=_structured(chat),
        thinking=thinking,
        effort=effort,
        sampling=to_sampling(chat, limits, _logprobs(chat), _max_tokens(chat)),
        max_tokens=_max_tokens(chat),
        stop=stop_strings(chat.stop),
        stream=bool(chat.stream),
        priority=chat.priority or 0,
        include_usage=includes_usage(chat),
        script=script,
        ignored=_ignored(raw, limits),
    )


def _ignored(raw: dict[str, Any], limits: RequestLimits) -> tuple[str, ...]:
    names = unknown_fields(raw, ChatBody)
    inner = unknown_fields(raw.get("chat_template_kwargs") or {}, TemplateSwitches)
    names += tuple(f"chat_template_kwargs.{name}" for name in inner)
    if limits.scripted:
        names = tuple(name for name in names if not name.startswith("baton_script"))
    return names + (("user",) if "user" in raw else ())


def _max_tokens(chat: ChatBody) -> int | None:
    """The smaller of the two limits that were sent."""
    return min(
        (m for m in (chat.max_tokens, chat.max_completion_tokens) if m is not None), default=None
    )


def _logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    return (chat.top_logprobs or 0) if chat.logprobs else None


def _check_images(messages: Sequence[Turn], limits: RequestLimits) -> None:
    count = len(image_sources(messages))
    if count > limits.max_images:
        raise InvalidRequest(
            f"`messages` hold {count} images; at most {limits.max_images} are allowed",
            param="messages",
        )


def _response_format(chat: ChatBody) -> ResponseFormat | None:
    wanted = chat.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.json_schema is None:
        param = "response_format.json_schema"
        raise InvalidRequest(f"`{param}` is required with the type json_schema", param=param)
    return wanted


def _structured(chat: ChatBody) -> StructuredOutputs | None:
    wanted = chat.structured_outputs
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "`structured_outputs` must hold exactly one of regex, grammar, json and choice",
            param="structured_outputs",
        )
    if chat.response_format is not None and chat.response_format.type != "text":
        raise InvalidRequest(
            "`structured_outputs` and `response_format` exclude each other",
            param="structured_outputs",
        )
    return wanted


def _thinking(chat: ChatBody) -> tuple[bool, str]:
    switches = chat.chat_template_kwargs or TemplateSwitches()
    off = switches.enable_thinking is False or switches.thinking is False
    off = off or (chat.thinking is not None and chat.thinking.type == "disabled")
    effort = chat.reasoning_effort
    if effort is None:
        return not off, "max"
    if effort == "none":
        return False, "max"
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"`reasoning_effort` is {effort[:40]!r}; it must be none, low, high or max "
            "(minimal means low, medium means high, xhigh means max)",
            param="reasoning_effort",
        )
    return not off, EFFORTS[effort]
