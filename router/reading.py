"""One choice of an answer: tokens in, what is new for the client out.

Joins the parser, the stop strings and the finish reason. Stop strings are looked for in the
response text only: not in reasoning, and not in a call's arguments. It knows no reply format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contract.messages import TokenItem, TokenOut
from router.prompt.detokenize import Detokenizer
from router.prompt.tokenizer import Tokenizer
from router.prompt.tools import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Moved,
    Reasoning,
    ReplyParser,
)
from router.schema.replies import FinishReason
from router.stops import StopMatcher


@dataclass(slots=True)
class News:
    """What one share of a frame brought. `tokens` are those that count; `moved` see `Moved`."""

    reasoning: str = ""
    content: str = ""
    moved: str = ""
    calls: list[CallStart | CallArguments] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    finish: FinishReason | None = None


class ChatReader:
    """Reads one choice of a chat. After `finish` nothing counts any more."""

    def __init__(
        self, tokenizer: Tokenizer, *, thinking: bool, delivers_tools: bool, stop: Sequence[str]
    ) -> None:
        """Start inside the channel that the prompt opened."""
        self.finish: FinishReason | None = None
        self.tokens = 0
        self._parser = ReplyParser(tokenizer, thinking=thinking, delivers_tools=delivers_tools)
        self._stops = StopMatcher(stop)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._parser.reasoning_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._stops.matched

    def feed(self, item: TokenItem) -> News:
        """What is new with this share of a frame."""
        news = News()
        for token in item.tokens:
            if self.finish is not None:
                return news
            self.tokens += 1
            news.tokens.append(token)
            self._take(self._parser.feed((token.id,)), news)
            if self._stops.matched is not None:
                self.finish = news.finish = "stop"
        if item.finish and self.finish is None:
            self._take(self._parser.finish(), news)
            if self._stops.matched is None:
                news.content += self._stops.flush()
            self.finish = news.finish = self._reason(item.finish)
        return news

    def _reason(self, finish: str) -> FinishReason:
        if self._stops.matched is not None:
            return "stop"
        if finish == "length":
            return "length"
        return "tool_calls" if self._parser.calls else "stop"

    def _take(self, events: Sequence[Event], news: News) -> None:
        for event in events:
            match event:
                case Content(text):
                    news.content += self._stops.feed(text)
                    if self._stops.matched is not None:
                        return
                case Reasoning(text):
                    news.reasoning += text
                case Moved(text):
                    news.moved += self._stops.feed(text)
                case CallStart() | CallArguments():
                    news.content += self._stops.flush()
                    news.calls.append(event)
                case CallEnd():
                    pass


class TextReader:
    """Reads one choice of a plain completion: text, and stop strings in it."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str]) -> None:
        """Start with no text."""
        self.finish: FinishReason | None = None
        self.tokens = 0
        self.reasoning_tokens = 0
        self._text = Detokenizer(tokenizer)
        self._stops = StopMatcher(stop)

    def feed(self, item: TokenItem) -> News:
        """What is new with this share of a frame."""
        news = News()
        for token in item.tokens:
            if self.finish is not None:
                return news
            self.tokens += 1
            news.tokens.append(token)
            news.content += self._stops.feed(self._text.feed(token.id))
            if self._stops.matched is not None:
                self.finish = news.finish = "stop"
        if item.finish and self.finish is None:
            news.content += self._stops.feed(self._text.flush())
            if self._stops.matched is None:
                news.content += self._stops.flush()
            cut = item.finish == "length" and self._stops.matched is None
            self.finish = news.finish = "length" if cut else "stop"
        return news
