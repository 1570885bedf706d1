"""Random replies under a grammar's masks: what a model without any sense would be held to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache

import torch

from common.contract.grammar import Grammar
from common.contract.messages import Sampling, TokenOut
from common.grammar.library import Vocabulary
from common.sampling.sampler import Row, sample
from router.prompt.form import Form, form_of
from router.prompt.tools import CallArguments, CallStart, Content, Reasoning, ReplyParser
from router.schema import RequestLimits, parse_chat
from tests.support.nano import ROOT, nano_tokenizer

TOKENIZER = nano_tokenizer()
LIMITS = RequestLimits(
    models=frozenset({"m"}), vocab=TOKENIZER.vocab, context=4096, eos=TOKENIZER.end_of_msg
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
ENDINGS = ('"', '"}', '":"', "}", "]", '"]', "}]", ")", "<|close|>", "<|end_of_msg|>")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(ROOT / "checkpoints/nano")


def form(**fields) -> Form:
    """The form of a chat request with these fields."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    request = parse_chat(json.dumps(body).encode(), LIMITS)
    return form_of(TOKENIZER, request, source_bytes=1 << 20)


def schema_form(schema, **fields) -> Form:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return form(response_format=wanted, reasoning_effort="none", **fields)


def tool_form(parameters, **fields) -> Form:
    tool = {"type": "function", "function": {"name": "act", "parameters": parameters}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False} | fields
    return form(reasoning_effort="none", **fields)


def plain(text: str) -> Grammar:
    """A grammar of one text."""
    return Grammar.of(f"%llguidance {{}}\nstart: {text} <[{TOKENIZER.end_of_msg}]>\n")


@dataclass
class Walk:
    """A reply, read as a client's would be."""

    ids: list[int]
    is_complete: bool
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def arguments(self):
        return json.loads(self.calls[0][1])


def walk(form: Form, seed: int, *, thinking=False, most=400, haste=6.0) -> Walk:
    """Draw tokens with random logits; `haste` is added to those that end something."""
    matcher = vocabulary().compile(form.grammar)
    torch.manual_seed(seed)
    hasty = [i for text in ENDINGS for i in TOKENIZER.encode_marked(text)]
    sampling = Sampling(seed=seed)
    ids: list[int] = []
    while len(ids) < most:
        logits = torch.randn(1, TOKENIZER.vocab) * 2
        logits[0, hasty] += haste * min(1.0, len(ids) / 40)
        row = Row(sampling=sampling, position=len(ids), mask=matcher.mask())
        (token,) = sample(logits, [row])
        assert isinstance(token, TokenOut), token
        matcher.take(token.id)
        assert not matcher.why_lost
        ids.append(token.id)
        if token.id == TOKENIZER.end_of_msg:
            break
    return read(ids, matcher.is_complete, thinking=thinking)


def read(ids, is_complete, *, thinking=False) -> Walk:
    parser = ReplyParser(TOKENIZER, thinking=thinking, delivers_tools=True)
    found = Walk(ids=ids, is_complete=is_complete)
    for event in [*parser.feed(ids), *parser.finish()]:
        match event:
            case Content(text):
                found.content += text
            case Reasoning(text):
                found.reasoning += text
            case CallStart(_, _, name):
                found.calls.append((name, ""))
            case CallArguments(index, text):
                found.calls[index] = (found.calls[index][0], found.calls[index][1] + text)
    return found
