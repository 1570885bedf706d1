"""HTTP as uvicorn reads it, with bounds on what a client may send before it is answered.

A head is refused when it grows too long or takes too long, before it is whole; so is what is no
HTTP. A connection on which a request was refused half-read is closed, but lingers for a moment, so
that a client that is still sending gets to read why. Bounds of bodies: `router/bodies.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.faults import fault, on_path
from router.schema.replies import encode

LINGER_S = 2.0  # how long a half-read connection stays open for reading after its answer


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, header_bytes: int, read_s: float, **more: Any) -> None:
        """`read_s`: from a head's first byte to its last."""
        super().__init__(*args, **more)
        self._header_bytes, self._read_s = header_bytes, read_s
        self._head = 0  # bytes of the head that is being read
        self._is_in_head, self._is_refused = True, False
        self._clock: asyncio.TimerHandle | None = None

    @property
    def is_half_read(self) -> bool:
        """Whether a request has begun to arrive and is not whole."""
        return self._head > 0 if self._is_in_head else True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first byte, as long as between two requests."""
        super().connection_made(Lingering(transport, self))  # type: ignore[arg-type]
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client, at most a buffer's worth; those after a refusal are dropped."""
        if self._is_refused:
            return
        if self._is_in_head:
            self._head += len(data)
            if self._clock is None:
                self._clock = self.loop.call_later(self._read_s, self._late)
        super().data_received(data)
        if self._is_in_head and self._head > self._header_bytes:
            self._refuse_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; what a chunked body brings after it is none of ours."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole.

        Raises:
            ValueError: its address is over the limit; the parser then calls `send_400_response`.
        """
        if len(self.url) > self._header_bytes:
            raise ValueError("the address is too long")
        self._is_in_head, self._head = False, 0
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole; another head may follow."""
        self._is_in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Nobody waits for the rest of a request that was answered before it was whole."""
        super().on_response_complete()
        if not self._is_in_head:
            self._is_refused = True
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What arrived is no HTTP, or too long to be read."""
        if len(getattr(self, "url", b"")) > self._header_bytes:
            self._refuse_long()
            return
        self._refuse(400, "this is no HTTP request that can be read", "invalid_http")

    def _late(self) -> None:
        self._clock = None
        self._refuse(
            408, f"the headers did not arrive within {self._read_s:g} s", "request_timeout"
        )

    def _refuse_long(self) -> None:
        """A head is over its limit: say which part of it has most of that."""
        limit = f"more than {self._header_bytes} bytes, the limit here"
        if 2 * len(getattr(self, "url", b"")) > self._header_bytes:
            self._refuse(414, f"the address has {limit}", "uri_too_long")
        else:
            self._refuse(431, f"the headers have {limit}", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._is_refused = True
        self._stop_clock()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the one before is being answered: no word in between
            return
        path = getattr(self, "url", b"").decode("latin-1").partition("?")[0]
        body = encode(on_path(path, fault(status, message, code=code)).body)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class Lingering:
    """A transport whose `close` lets a client that is still sending read its answer first."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedHttp) -> None:
        """Everything but `close` is the transport's own."""
        self._transport, self._connection = transport, connection
        self._is_closing = False
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        """The transport's."""
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more can be said."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Say nothing more; hang up at once, or soon after where something is still coming."""
        if self.is_closing():
            return
        self._is_closing = True
        if not (self._connection.is_half_read and self._transport.can_write_eof()):
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._connection.loop.call_later(LINGER_S, self._transport.close)
