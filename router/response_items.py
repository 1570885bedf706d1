"""Items of a response while they are streamed: events in, order and numbers kept.

One item is open at a time. It begins when something of its kind comes and is done when something
else comes, or the answer ends.
"""

from __future__ import annotations

import secrets
from typing import Any

from router.prompt.tools import CallArguments, CallStart
from router.reading import News
from router.schema.replies import encode
from router.schema.response_replies import (
    ArgumentsDone,
    ArgumentsMore,
    CallOutItem,
    ItemAdded,
    ItemDone,
    ItemOut,
    MessageOutItem,
    Numbered,
    OutputTextOut,
    PartAdded,
    PartDone,
    ReasoningDone,
    ReasoningMore,
    ReasoningOutItem,
    ReasoningTextOut,
    Status,
    TextDone,
    TextMore,
)


def reasoning_item(text: str | None, *, id: str = "", status: Status = "completed") -> ItemOut:
    """A reasoning item; without text it has no part yet."""
    content = [] if text is None else [ReasoningTextOut(text=text)]
    return ReasoningOutItem(id=id or new_id("rs"), status=status, summary=[], content=content)


def message_item(text: str | None, *, id: str = "", status: Status = "completed") -> ItemOut:
    """A message item; without text it has no part yet."""
    content = [] if text is None else [OutputTextOut(text=text, annotations=[], logprobs=[])]
    return MessageOutItem(id=id or new_id("msg"), status=status, role="assistant", content=content)


def call_item(
    call: CallStart, arguments: str, *, id: str = "", status: Status = "completed"
) -> ItemOut:
    """A call's item."""
    return CallOutItem(
        id=id or new_id("fc"),
        status=status,
        call_id=call.id,
        name=call.name,
        arguments=arguments,
    )


def new_id(prefix: str) -> str:
    """A new item's id."""
    return f"{prefix}_{secrets.token_hex(12)}"


class ItemStream:
    """Events of items, as bytes; `done` are the items that are whole."""

    def __init__(self) -> None:
        """No item and no event yet."""
        self.done: list[ItemOut] = []
        self._number = 0
        self._open = ""  # reasoning, message, call, or nothing
        self._id = ""
        self._call: CallStart | None = None
        self._pieces: list[str] = []

    def event(self, kind: type[Numbered], **fields: Any) -> bytes:
        """The next event."""
        data = encode(kind(sequence_number=self._number, **fields))
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (str(kind.__struct_config__.tag).encode(), data)

    def more(self, news: News) -> bytes:
        """Events for what is new."""
        out = b""
        if news.reasoning:
            out += self._begin("reasoning")
            out += self._piece(ReasoningMore, news.reasoning)
        if text := news.moved + news.content:
            out += self._begin("message")
            out += self._piece(TextMore, text, logprobs=[])
        for call in news.calls:
            out += self._of_call(call)
        return out

    def end(self, status: Status = "completed") -> bytes:
        """Events that end the open item, if one is open."""
        kind, text = self._open, "".join(self._pieces)
        if not kind:
            return b""
        at = self._at()
        item = self._item(text, status)
        out = b""
        if kind == "call":
            assert self._call is not None
            out += self.event(ArgumentsDone, **at, name=self._call.name, arguments=text)
        elif kind == "message":
            out += self.event(TextDone, **at, content_index=0, text=text, logprobs=[])
        else:
            out += self.event(ReasoningDone, **at, content_index=0, text=text)
        if isinstance(item, MessageOutItem | ReasoningOutItem):
            out += self.event(PartDone, **at, content_index=0, part=item.content[0])
        out += self.event(ItemDone, output_index=len(self.done), item=item)
        self.done.append(item)
        self._open, self._pieces = "", []
        return out

    def _of_call(self, call: CallStart | CallArguments) -> bytes:
        if isinstance(call, CallStart):
            out = self.end()
            self._call = call
            return out + self._begin("call")
        self._pieces.append(call.text)
        return self.event(ArgumentsMore, **self._at(), delta=call.text) if call.text else b""

    def _begin(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        out = self.end()
        self._open = kind
        self._id = new_id({"reasoning": "rs", "message": "msg", "call": "fc"}[kind])
        item = self._item(None, "in_progress")
        out += self.event(ItemAdded, output_index=len(self.done), item=item)
        whole = self._item("", "in_progress")
        if isinstance(whole, MessageOutItem | ReasoningOutItem):
            out += self.event(PartAdded, **self._at(), content_index=0, part=whole.content[0])
        return out

    def _piece(self, kind: type[Numbered], text: str, **fields: Any) -> bytes:
        self._pieces.append(text)
        return self.event(kind, **self._at(), content_index=0, delta=text, **fields)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.done)}

    def _item(self, text: str | None, status: Status) -> ItemOut:
        if self._open == "call":
            assert self._call is not None
            return call_item(self._call, text or "", id=self._id, status=status)
        make = message_item if self._open == "message" else reasoning_item
        return make(text, id=self._id, status=status)
