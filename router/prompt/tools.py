"""A reply's token ids to reasoning, text and tool calls, one token at a time.

Control tokens are ids: text that merely looks like a marker stays text. The parser takes a reply
cut anywhere, one that skips a channel and one that never ends; it never invents what was not
there. It knows neither stop strings nor HTTP. The rules for irregular replies: docs/api.md.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from router.prompt.detokenize import Detokenizer
from router.prompt.tokenizer import Tokenizer
from router.schema.json_text import is_json

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the response channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Moved:
    """All reasoning so far was the response: its close tag came while no response was open."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces of a finished call are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call is complete."""

    index: int


Event = Reasoning | Content | Moved | CallStart | CallArguments | CallEnd


class _In(Enum):
    """Where in the reply the next text belongs."""

    THINK = auto()
    GAP = auto()  # after think, before response
    RESPONSE = auto()
    BETWEEN = auto()  # after response; also inside tools, outside of a call
    CALL = auto()
    STRING = auto()  # a string argument, let out as it comes
    VALUE = auto()  # any other argument, kept until it is whole
    AGAIN = auto()  # an argument that the call has already
    RAW = auto()  # arguments as one JSON text
    END = auto()


_ARGUMENT = (_In.STRING, _In.VALUE, _In.AGAIN)


def new_call_id() -> str:
    """An id for a tool call; the model's format has none."""
    return f"call_{secrets.token_hex(12)}"


class ReplyParser:
    """Reads one reply. `feed` tokens, then `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        delivers_tools: bool,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Start inside the channel that the prompt opened.

        Args:
            tokenizer: the checkpoint's.
            thinking: whether the prompt opened the think channel.
            delivers_tools: whether calls are given out; they are read either way.
            call_id: makes a new call's id.
        """
        self.reasoning_tokens = 0
        self.calls = 0  # complete calls given out
        self._t = tokenizer
        self._text = Detokenizer(tokenizer)
        self._delivers = delivers_tools
        self._call_id = call_id
        self._in = _In.THINK if thinking else _In.RESPONSE
        self._tag: str | None = None  # text since an open or close marker
        self._opens = False
        self._thoughts: list[str] = []
        self._index = -1
        self._keys: set[str] = set()  # arguments of the call so far
        self._value = ""
        self._out: list[Event] = []

    def feed(self, tokens: Iterable[int]) -> list[Event]:
        """Events that became certain with these tokens."""
        base = self._t.base
        for token in tokens:
            if self._in is _In.END:
                break
            if token < base:
                if self._in is _In.THINK and self._tag is None:
                    self.reasoning_tokens += 1
                self._put(self._text.feed(token))
            else:
                self._put(self._text.flush())
                self._control(token)
        return self._take()

    def finish(self) -> list[Event]:
        """The rest, when no more tokens come. An unfinished marker or argument is not completed."""
        if self._in is not _In.END:
            self._put(self._text.flush())
            self._in = _In.END
        return self._take()

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _emit(self, event: Event) -> None:
        """Add an event, joined to the last one where both are pieces of the same text."""
        last = self._out[-1] if self._out else None
        if (isinstance(event, Reasoning | Content) and type(last) is type(event)) or (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == event.index
        ):
            self._out[-1] = replace(event, text=last.text + event.text)
        else:
            self._out.append(event)

    def _control(self, token: int) -> None:
        if token in (self._t.open, self._t.close):
            self._tag, self._opens = "", token == self._t.open
        elif token == self._t.sep and self._tag is not None:
            tag, self._tag = self._tag, None
            name, _, rest = tag.partition(" ")
            if self._opens:
                self._open(name, rest)
            else:
                if name in ("message", "tools"):
                    self._leave_call()
                self._close(name)
        elif token == self._t.end_of_msg:
            self._leave_call()
            self._in = _In.END

    def _put(self, text: str) -> None:
        if not text:
            return
        where = self._in
        if self._tag is not None:
            self._tag += text
        elif where is _In.THINK:
            self._thoughts.append(text)
            self._emit(Reasoning(text))
        elif where is _In.RESPONSE:
            self._emit(Content(text))
        elif where is _In.GAP:
            if text := text.lstrip():  # words without a channel are for the reader
                self._in = _In.RESPONSE
                self._emit(Content(text))
        elif where is _In.STRING:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        elif where is _In.VALUE:
            self._value += text
        elif where is _In.RAW:
            self._argue(text)

    def _argue(self, text: str) -> None:
        if self._delivers:
            self._emit(CallArguments(self._index, text))

    def _open(self, name: str, rest: str) -> None:
        if name == "think" and self._in in (_In.GAP, _In.RESPONSE):
            self._in = _In.THINK
        elif name == "response":
            self._in = _In.RESPONSE
        elif name == "tools":
            self._in = _In.BETWEEN
        elif name == "call":
            self._open_call(_attributes(rest))
        elif name == "argument" and self._in is _In.CALL:
            self._open_argument(_attributes(rest))
        elif name == "json" and self._in is _In.CALL and not self._keys:
            self._in = _In.RAW

    def _open_call(self, attributes: dict[str, str]) -> None:
        self._leave_call()
        self._in, self._keys = _In.BETWEEN, set()
        if name := attributes.get("tool"):
            self._in = _In.CALL
            self._index += 1
            if self._delivers:
                self._emit(CallStart(self._index, self._call_id(), name))

    def _open_argument(self, attributes: dict[str, str]) -> None:
        key = json.dumps(attributes.get("key", ""), ensure_ascii=False)
        if key in self._keys:
            self._in = _In.AGAIN
            return
        self._argue(f"{', ' if self._keys else '{'}{key}: ")
        self._keys.add(key)
        if attributes.get("type", "string") == "string":
            self._in = _In.STRING
            self._argue('"')
        else:
            self._in, self._value = _In.VALUE, ""

    def _close(self, name: str) -> None:
        where = self._in
        if name == "message":
            self._in = _In.END
        elif name == "think" and where is _In.THINK:
            self._in = _In.GAP
        elif name == "response" and where is _In.THINK:
            if self._thoughts:
                self._emit(Moved("".join(self._thoughts)))
            self.reasoning_tokens, self._in = 0, _In.BETWEEN
        elif name == "response" and where in (_In.RESPONSE, _In.GAP):
            self._in = _In.BETWEEN
        elif name == "argument" and where in _ARGUMENT:
            self._end_argument()
            self._in = _In.CALL
        elif name in ("json", "call") and where is _In.RAW:
            self._close_call()
        elif name == "call" and where is _In.CALL:
            self._argue("}" if self._keys else "{}")
            self._close_call()

    def _end_argument(self) -> None:
        if self._in is _In.STRING:
            self._argue('"')
        elif self._in is _In.VALUE:
            self._argue(_as_json(self._value))

    def _leave_call(self) -> None:
        """The model went on without closing a call: its arguments end here, and are JSON."""
        if self._in is _In.RAW:
            self._close_call()
        elif self._in is _In.CALL or self._in in _ARGUMENT:
            self._end_argument()
            self._argue("}" if self._keys else "{}")
            self._close_call()

    def _close_call(self) -> None:
        self._in = _In.BETWEEN
        if self._delivers:
            self.calls += 1
            self._emit(CallEnd(self._index))


def _attributes(text: str) -> dict[str, str]:
    return {
        key: value.replace("&quot;", '"').replace("&amp;", "&")
        for key, value in _ATTRIBUTE.findall(text)
    }


def _as_json(text: str) -> str:
    """The value as it was written when it is JSON, else as a JSON string. No digit is lost."""
    return text if is_json(text) else json.dumps(text, ensure_ascii=False)
