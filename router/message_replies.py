"""Answers of Anthropic's `/v1/messages`: the whole message, and the events of a stream.

Blocks stand in the order in which the model wrote them: thinking, text, calls. Knows nothing of
sockets.
"""

from __future__ import annotations

import json

import msgspec

from common.contract.messages import TokenItem
from router.faults import Fault, anthropic_body
from router.prompt.tokenizer import Tokenizer
from router.prompt.tools import CallArguments, CallStart
from router.reading import ChatReader
from router.replies import Gathered, Head
from router.schema.anthropic_replies import (
    BlockDelta,
    BlockOut,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageDelta,
    MessageEvent,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextDelta,
    TextOut,
    ThinkingDelta,
    ThinkingOut,
    ToolUseOut,
)
from router.schema.chat import ChatRequest
from router.schema.replies import encode
from router.teller import Spent

SIGNATURE = "unsigned"  # clients keep reasoning only with some signature beside it


class MessageAnswer:
    """A `Teller` of one message."""

    def __init__(
        self, request: ChatRequest, tokenizer: Tokenizer, head: Head, *, prompt_tokens: int
    ) -> None:
        """Nothing has been said; `prompt_tokens` is told at once."""
        self._head, self._prompt_tokens = head, prompt_tokens
        self._reader = ChatReader(
            tokenizer,
            thinking=request.thinking,
            delivers_tools=request.delivers_tools,
            stop=request.stop,
        )
        self._gathered = Gathered()
        self._index = -1
        self._open: type[BlockOut] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the message has ended."""
        return self._reader.finish is not None

    def take(self, item: TokenItem) -> None:
        """Read a share of a frame, for a whole reply."""
        self._gathered.add(self._reader.feed(item))

    def whole(self, spent: Spent) -> bytes:
        """The whole message."""
        said, blocks = self._gathered, list[BlockOut]()
        if said.reasoning:
            blocks.append(ThinkingOut(thinking="".join(said.reasoning), signature=SIGNATURE))
        if text := "".join(said.content):
            blocks.append(TextOut(text=text))
        for start, parts in said.calls:
            blocks.append(ToolUseOut(id=start.id, name=start.name, input=_input("".join(parts))))
        return encode(self._message(blocks, self._usage(spent), *self._stop()))

    def opening(self) -> bytes:
        """`message_start` and a ping."""
        used = self._usage(Spent(prompt=self._prompt_tokens))
        return _events([MessageStart(message=self._message([], used, None, None)), Ping()])

    def more(self, item: TokenItem) -> bytes:
        """Events for a share of a frame."""
        news = self._reader.feed(item)
        out: list[MessageEvent] = []
        if news.reasoning:
            self._begin(out, ThinkingOut(thinking="", signature=""))
            out.append(self._delta(ThinkingDelta(thinking=news.reasoning)))
        if text := news.moved + news.content:
            self._begin(out, TextOut(text=""))
            out.append(self._delta(TextDelta(text=text)))
        for call in news.calls:
            out += self._call(call)
        return _events(out)

    def closing(self, spent: Spent) -> bytes:
        """The end of the last block, the reason, and `message_stop`."""
        out: list[MessageEvent] = []
        self._end(out)
        reason, sequence = self._stop()
        delta = StopDelta(stop_reason=reason, stop_sequence=sequence)
        return _events([*out, MessageDelta(delta=delta, usage=self._usage(spent)), MessageStop()])

    def broken(self, told: Fault) -> bytes:
        """An `error` event."""
        return b"event: error\ndata: " + encode(anthropic_body(told)) + b"\n\n"

    def _call(self, call: CallStart | CallArguments) -> list[MessageEvent]:
        out: list[MessageEvent] = []
        if isinstance(call, CallStart):
            self._end(out)
            self._begin(out, ToolUseOut(id=call.id, name=call.name, input={}))
        elif call.text:
            out.append(self._delta(InputDelta(partial_json=call.text)))
        return out

    def _begin(self, out: list[MessageEvent], block: BlockOut) -> None:
        if self._open is type(block):
            return
        self._end(out)
        self._index += 1
        self._open = type(block)
        out.append(BlockStart(index=self._index, content_block=block))

    def _end(self, out: list[MessageEvent]) -> None:
        if self._open is None:
            return
        if self._open is ThinkingOut:
            out.append(self._delta(SignatureDelta(signature=SIGNATURE)))
        out.append(BlockStop(index=self._index))
        self._open = None

    def _delta(
        self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta
    ) -> MessageEvent:
        return BlockDelta(index=self._index, delta=delta)

    def _stop(self) -> tuple[StopReason, str | None]:
        if self._reader.stop_string is not None:
            return "stop_sequence", self._reader.stop_string
        reasons: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
        return reasons.get(self._reader.finish or "", "end_turn"), None

    def _usage(self, spent: Spent) -> MessageUsage:
        return MessageUsage(
            input_tokens=spent.prompt - spent.cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=spent.cached,
            output_tokens=self._reader.tokens,
        )

    def _message(
        self,
        content: list[BlockOut],
        used: MessageUsage,
        reason: StopReason | None,
        sequence: str | None,
    ) -> MessageReply:
        return MessageReply(
            id=self._head.id,
            role="assistant",
            model=self._head.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=used,
        )


def _events(events: list[MessageEvent]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))
        for event in events
    )


def _input(text: str) -> msgspec.Raw | dict[str, object]:
    """A call's arguments as they were written; nothing where the token limit cut them off."""
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if is_object and text else {}
