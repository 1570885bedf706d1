"""Answers of `/v1/responses`: the whole response, and the events of a stream.

Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from common.contract.messages import TokenItem
from router.faults import Fault
from router.prompt.tokenizer import Tokenizer
from router.reading import ChatReader
from router.replies import Gathered, Head
from router.response_items import ItemStream, call_item, message_item, reasoning_item
from router.schema.chat import ChatRequest
from router.schema.replies import encode
from router.schema.response_replies import (
    Completed,
    Created,
    EndedIncomplete,
    Failed,
    Incomplete,
    InProgress,
    InputDetails,
    ItemOut,
    OutputDetails,
    ResponseFault,
    ResponseReply,
    ResponseUsage,
    Status,
)
from router.teller import Spent


class ResponseAnswer:
    """A `Teller` of one response."""

    def __init__(
        self, request: ChatRequest, tokenizer: Tokenizer, head: Head, *, raw: Mapping[str, Any]
    ) -> None:
        """Nothing has been said; `raw` is the body, which a response repeats in part."""
        self._reader = ChatReader(
            tokenizer,
            thinking=request.thinking,
            delivers_tools=request.delivers_tools,
            stop=request.stop,
        )
        self._gathered = Gathered()
        self._items = ItemStream()
        self._blank = _blank(request, head, raw)

    @property
    def is_complete(self) -> bool:
        """Whether the response has ended."""
        return self._reader.finish is not None

    def take(self, item: TokenItem) -> None:
        """Read a share of a frame, for a whole reply."""
        self._gathered.add(self._reader.feed(item))

    def whole(self, spent: Spent) -> bytes:
        """The whole response."""
        said, items = self._gathered, list[ItemOut]()
        if said.reasoning:
            items.append(reasoning_item("".join(said.reasoning)))
        if text := "".join(said.content):
            items.append(message_item(text))
        items += [call_item(start, "".join(parts)) for start, parts in said.calls]
        if self._status == "incomplete" and items:
            items[-1] = msgspec.structs.replace(items[-1], status="incomplete")
        return encode(self._ended(items, spent))

    def opening(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        return self._items.event(Created, response=self._blank) + self._items.event(
            InProgress, response=self._blank
        )

    def more(self, item: TokenItem) -> bytes:
        """Events for a share of a frame."""
        return self._items.more(self._reader.feed(item))

    def closing(self, spent: Spent) -> bytes:
        """The end of the last item, and `response.completed` or `response.incomplete`."""
        status = self._status
        out = self._items.end(status)
        kind = EndedIncomplete if status == "incomplete" else Completed
        return out + self._items.event(kind, response=self._ended(self._items.done, spent))

    def broken(self, told: Fault) -> bytes:
        """`response.failed`."""
        code = "rate_limit_exceeded" if told.status == 429 else "server_error"
        failed = msgspec.structs.replace(
            self._blank,
            status="failed",
            error=ResponseFault(code=code, message=told.error["message"]),
            output=self._items.done,
        )
        return self._items.event(Failed, response=failed)

    @property
    def _status(self) -> Status:
        return "incomplete" if self._reader.finish == "length" else "completed"

    def _ended(self, items: list[ItemOut], spent: Spent) -> ResponseReply:
        status, tokens = self._status, self._reader.tokens
        return msgspec.structs.replace(
            self._blank,
            status=status,
            output=items,
            incomplete_details=(
                Incomplete(reason="max_output_tokens") if status == "incomplete" else None
            ),
            usage=ResponseUsage(
                input_tokens=spent.prompt,
                input_tokens_details=InputDetails(cached_tokens=spent.cached, cache_write_tokens=0),
                output_tokens=tokens,
                output_tokens_details=OutputDetails(reasoning_tokens=self._reader.reasoning_tokens),
                total_tokens=spent.prompt + tokens,
            ),
        )


def _blank(request: ChatRequest, head: Head, raw: Mapping[str, Any]) -> ResponseReply:
    """The response before anything was said."""
    told = raw.get("text") or {}
    return ResponseReply(
        id=head.id.replace("-", "_"),
        object="response",
        created_at=head.created,
        status="in_progress",
        error=None,
        incomplete_details=None,
        instructions=raw.get("instructions"),
        max_output_tokens=raw.get("max_output_tokens"),
        model=head.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=None,
        reasoning={"effort": request.effort if request.thinking else "none", "summary": None},
        store=False,
        temperature=request.sampling.temperature,
        text={"format": {"type": "text"}} | {k: v for k, v in told.items() if v is not None},
        tool_choice=raw.get("tool_choice") or "auto",
        tools=raw.get("tools") or [],
        top_p=request.sampling.top_p,
        truncation="disabled",
        usage=None,
        metadata=raw.get("metadata") or {},
    )
