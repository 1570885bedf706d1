"""Answers in OpenAI's shapes: whole replies, and the chunks of a stream.

Takes shares of frames, one choice at a time, and knows nothing of sockets. What a whole reply says
is what the chunks of a stream add up to, with one documented exception: a reply without a think
channel (see `Moved`), whose words a stream has already sent as reasoning and repeats as content.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from common.contract.messages import TokenItem
from router.logprobs import chat_logprobs
from router.prompt.tokenizer import Tokenizer
from router.prompt.tools import CallArguments, CallStart
from router.reading import ChatReader, News
from router.schema.chat import ChatRequest
from router.schema.replies import (
    CallDelta,
    CallOut,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChunkChoice,
    CompletionDetails,
    DeltaOut,
    FunctionOut,
    Logprobs,
    MessageOut,
    PromptDetails,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every part of one reply repeats."""

    id: str
    created: int
    model: str


def new_head(model: str, prefix: str = "chatcmpl") -> Head:
    """An id that is unique whatever the client's request id says, and the time, once."""
    return Head(id=f"{prefix}-{secrets.token_hex(12)}", created=int(time.time()), model=model)


def usage(
    *, prompt: int, completion: int, reasoning: int = 0, cached: int = 0, image: int = 0
) -> Usage:
    """Counts of tokens, each from the stage that did the work."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached, image_tokens=image),
        completion_tokens_details=CompletionDetails(reasoning_tokens=reasoning),
    )


@dataclass(slots=True)
class Gathered:
    """What one choice has said so far."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, news: News) -> None:
        """Append what is new; words that turned out to be content are moved."""
        if news.reasoning:
            self.reasoning.append(news.reasoning)
        if news.moved:
            self.reasoning.clear()
            self.content.append(news.moved)
        if news.content:
            self.content.append(news.content)
        for call in news.calls:
            if isinstance(call, CallStart):
                self.calls.append((call, []))
            else:
                self.calls[call.index][1].append(call.text)

    def message(self) -> MessageOut:
        calls = [
            CallOut(
                id=start.id,
                type="function",
                function=FunctionOut(name=start.name, arguments="".join(pieces)),
            )
            for start, pieces in self.calls
        ]
        content = "".join(self.content)
        return MessageOut(
            role="assistant",
            content=None if calls and not content else content,
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=calls or None,
        )


class ChatAnswer:
    """Both ways to answer a chat request: `chunks` for a stream, `take` and `whole` otherwise."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, head: Head) -> None:
        """Nothing has been said."""
        self.head = head
        self._tokenizer = tokenizer
        self._logprobs = request.sampling.logprobs
        self._usage: msgspec.UnsetType | None = None if request.include_usage else msgspec.UNSET
        self._readers = [
            ChatReader(
                tokenizer,
                thinking=request.thinking,
                delivers_tools=request.delivers_tools,
                stop=request.stop,
            )
            for _ in range(request.sampling.n)
        ]
        self._gathered = [Gathered() for _ in self._readers]

    @property
    def is_complete(self) -> bool:
        """Whether every choice has its finish reason; the rooms may still be at work on some."""
        return all(reader.finish is not None for reader in self._readers)

    def usage(self, *, prompt: int, cached: int = 0, image: int = 0) -> Usage:
        """Usage so far; the prompt counts once, the choices add up."""
        return usage(
            prompt=prompt,
            completion=sum(reader.tokens for reader in self._readers),
            reasoning=sum(reader.reasoning_tokens for reader in self._readers),
            cached=cached,
            image=image,
        )

    def take(self, item: TokenItem) -> None:
        """Read one choice's share of a frame, for a whole reply."""
        news = self._readers[item.choice].feed(item)
        gathered = self._gathered[item.choice]
        gathered.add(news)
        if self._logprobs is not None:
            gathered.logprobs += chat_logprobs(self._tokenizer, news.tokens, self._logprobs)

    def whole(self, used: Usage) -> ChatCompletion:
        """The whole reply, once complete."""
        choices = [
            Choice(
                index=index,
                message=gathered.message(),
                logprobs=None if self._logprobs is None else Logprobs(content=gathered.logprobs),
                finish_reason=reader.finish or "stop",
            )
            for index, (reader, gathered) in enumerate(
                zip(self._readers, self._gathered, strict=True)
            )
        ]
        return ChatCompletion(
            id=self.head.id,
            object="chat.completion",
            created=self.head.created,
            model=self.head.model,
            choices=choices,
            usage=used,
        )

    def opening(self) -> list[ChatChunk]:
        """First chunks, one a choice: the role. They go out before any token exists."""
        return [
            self._chunk([_choice(index, DeltaOut(role="assistant", content=""))])
            for index in range(len(self._readers))
        ]

    def chunks(self, item: TokenItem) -> list[ChatChunk]:
        """Chunks for one choice's share of a frame; the last of a choice has the finish reason.

        Logprobs of tokens that have no text yet go out at once, in a chunk without text.
        """
        news = self._readers[item.choice].feed(item)
        parts = []
        if news.reasoning:
            parts.append(DeltaOut(reasoning_content=news.reasoning))
        if news.moved or news.content:
            parts.append(DeltaOut(content=news.moved + news.content))
        if news.calls:
            parts.append(DeltaOut(tool_calls=[_call_delta(call) for call in news.calls]))
        logprobs = None
        if self._logprobs is not None and news.tokens:
            entries = chat_logprobs(self._tokenizer, news.tokens, self._logprobs)
            logprobs = Logprobs(content=entries)
            parts = parts or [DeltaOut()]
        choices = [_choice(item.choice, part) for part in parts]
        if logprobs is not None:
            choices[0] = msgspec.structs.replace(choices[0], logprobs=logprobs)
        if news.finish is not None:
            last = ChunkChoice(index=item.choice, delta=DeltaOut(), finish_reason=news.finish)
            choices.append(last)
        return [self._chunk([choice]) for choice in choices]

    def closing(self, used: Usage) -> list[ChatChunk]:
        """The last chunk before `[DONE]`: usage, if the request asked for it."""
        if self._usage is msgspec.UNSET:
            return []
        return [msgspec.structs.replace(self._chunk([]), usage=used)]

    def _chunk(self, choices: Sequence[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.head.id,
            object="chat.completion.chunk",
            created=self.head.created,
            model=self.head.model,
            choices=list(choices),
            usage=self._usage,
        )


def _choice(index: int, delta: DeltaOut) -> ChunkChoice:
    return ChunkChoice(index=index, delta=delta, finish_reason=None)


def _call_delta(call: CallStart | CallArguments) -> CallDelta:
    if isinstance(call, CallStart):
        function = FunctionOut(name=call.name, arguments="")
        return CallDelta(index=call.index, id=call.id, type="function", function=function)
    return CallDelta(index=call.index, function=FunctionOut(arguments=call.text))
