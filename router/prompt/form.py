"""From a chat request to the grammar of its reply: channels outside, the client's form inside.

A reply is held to K3's channels from its first token on: thoughts are free, the response follows
the client's schema, expression or grammar, and calls name declared tools with arguments that follow
their parameters. Nothing is compiled here, and nothing is known of rooms. Rules: docs/api.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.contract.grammar import Grammar
from common.errors import InvalidRequest
from router.prompt.arguments import Parameters
from router.prompt.ebnf import write_grammar
from router.prompt.endless import refuse_endless
from router.prompt.schemas import check_schema
from router.prompt.sheet import LOOSE, Sheet, attribute, choice, expression
from router.prompt.tokenizer import Tokenizer
from router.schema.chat import ChatRequest, ResponseFormat, StructuredOutputs
from router.schema.messages import DeveloperMessage, SystemMessage

MOST_CALLS = 8  # in one reply, where calls are enforced


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The grammar of a reply; `param` names the field it came from.

    `beginnings` are ways a reply may begin, after each of which something must be possible.
    """

    grammar: Grammar
    beginnings: tuple[tuple[int, ...], ...]
    param: str


def needs_form(request: ChatRequest) -> bool:
    """Whether anything of the reply is to be enforced."""
    return bool(
        request.response_format is not None
        or request.structured_outputs is not None
        or request.tool_choice == "required"
        or any(tool["function"].get("strict") is True for tool in _tools(request))
    )


def form_of(tokenizer: Tokenizer, request: ChatRequest, *, source_bytes: int) -> Form:
    """The form of a request that needs one.

    Raises:
        InvalidRequest: the form cannot be enforced, or its text is longer than `source_bytes`.
    """
    tools = _tools(request)
    is_required = request.tool_choice == "required"
    formed = request.response_format is not None or request.structured_outputs is not None
    _refuse_beside(request, tokenizer.end_of_msg)
    sheet = _Reply(tokenizer, request)
    param = _param(request) if formed and not is_required else "tools"
    if is_required:
        start = sheet.calls(tools)
    else:
        start = sheet.answer() if formed else sheet.free_answer()
        if tools:
            start = (
                f"({start} | {sheet.calls(tools)})" if formed else f"{start} {sheet.more(tools)}"
            )
    source = sheet.source(start)
    if len(source.encode()) > source_bytes:
        raise InvalidRequest(
            f"`{param}` becomes a grammar of {len(source.encode())} bytes; at most {source_bytes} "
            "are compiled",
            param=param,
        )
    return Form(grammar=Grammar.of(source), beginnings=(sheet.beginning(),), param=param)


def _tools(request: ChatRequest) -> list[Mapping[str, Any]]:
    """What may be called: declared tools, or the one that was named."""
    if not request.delivers_tools:
        return []
    declared: list[Mapping[str, Any]] = list(request.tools)
    for message in request.messages:
        if isinstance(message, SystemMessage | DeveloperMessage) and message.tools:
            declared += message.tools
    if request.named_tool is None:
        return declared
    return [tool for tool in declared if tool["function"]["name"] == request.named_tool][:1]


def _param(request: ChatRequest) -> str:
    if request.response_format is None:
        return "structured_outputs"
    return "response_format"


def _refuse_beside(request: ChatRequest, eos: int) -> None:
    """A grammar decides where a reply ends; fields that decide otherwise exclude it."""
    other = "min_tokens" if request.sampling.min_tokens else "ignore_eos"
    if request.sampling.min_tokens or eos not in request.sampling.stop_ids:
        raise InvalidRequest(
            f"`{other}` and an answer in a given form exclude each other: the form says where "
            "the answer ends",
            param=other,
        )


class _Reply:
    """The channels of one reply."""

    def __init__(self, tokenizer: Tokenizer, request: ChatRequest) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._sheet = Sheet(tokenizer)
        self._arguments: dict[int, str] = {}

    def source(self, start: str) -> str:
        """The whole text. A model may skip the end of its thoughts."""
        sheet = self._sheet
        opening = ""
        if self._request.thinking:
            opening = f"{sheet.any_text} ({sheet.closed('think')})? {sheet.opened('response')} "
        return sheet.source(f"{opening}{start} {sheet.ended()}")

    def beginning(self) -> tuple[int, ...]:
        """Up to where the response begins."""
        t = self._tokenizer
        return tuple(t.encode_marked("<|open|>response<|sep|>")) if self._request.thinking else ()

    def answer(self) -> str:
        """The response in the client's form."""
        body = _body(self._sheet, self._request.response_format, self._request.structured_outputs)
        return f"{body} {self._sheet.closed('response')}"

    def free_answer(self) -> str:
        """The response in any form."""
        return f"{self._sheet.any_text} {self._sheet.closed('response')}"

    def more(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Calls after the response, or none."""
        return f"({self._channel(tools)})?"

    def calls(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """An empty response, and at least one call."""
        return f"{self._sheet.closed('response')} {self._channel(tools)}"

    def _channel(self, tools: Sequence[Mapping[str, Any]]) -> str:
        request, sheet = self._request, self._sheet
        several = request.parallel_tool_calls and request.named_tool is None
        rest = ""
        for index in range(MOST_CALLS if several else 1, 0, -1):
            ways = [self._call(index, place, tool) for place, tool in enumerate(tools)]
            rule = sheet.rule(f"({' | '.join(ways)}) {sheet.closed('call')}")
            rest = sheet.rule(f"{rule} {f'({rest})?' if rest else ''}")
        return f"{sheet.opened('tools')} {rest} {sheet.closed('tools')}"

    def _call(self, index: int, place: int, tool: Mapping[str, Any]) -> str:
        if place not in self._arguments:
            body = self._parameters(place, tool["function"])
            self._arguments[place] = self._sheet.rule(body) if body else ""
        name = attribute(tool["function"]["name"])
        tag = self._sheet.opened(f'call tool="{name}" index="{index}"')
        return f"{tag} {self._arguments[place]}"

    def _parameters(self, place: int, function: Mapping[str, Any]) -> str:
        """A tool is held to its schema when it must be called, or says that it is strict."""
        schema = function.get("parameters")
        param = f"tools[{place}].function.parameters"
        if self._request.tool_choice != "required" and function.get("strict") is not True:
            return Parameters(self._sheet, {}, param).write()
        if schema is None:
            return ""
        check_schema(schema, param)
        refuse_endless(schema, param)
        return Parameters(self._sheet, schema, param).write()


def _body(sheet: Sheet, wanted: ResponseFormat | None, structured: StructuredOutputs | None) -> str:
    if wanted is not None:
        if wanted.json_schema is None:
            return sheet.json({"type": "object"}, LOOSE)
        return _schema(sheet, wanted.json_schema.schema, "response_format.json_schema.schema")
    assert structured is not None
    if structured.json is not None:
        return _schema(sheet, structured.json, "structured_outputs.json")
    if structured.regex is not None:
        return expression(structured.regex, "structured_outputs.regex")
    if structured.choice is not None:
        return choice(structured.choice, "structured_outputs.choice")
    assert structured.grammar is not None
    return write_grammar(sheet, structured.grammar, "structured_outputs.grammar")


def _schema(sheet: Sheet, schema: Mapping[str, Any], param: str) -> str:
    check_schema(schema, param)
    refuse_endless(schema, param)
    return sheet.json(schema, LOOSE)
