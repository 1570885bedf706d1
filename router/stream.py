"""Server-sent events: framing, comments while nothing happens, and a client that leaves.

Knows bytes and connections. What the events say is made elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, TypeVar

from common.errors import Cancelled

T = TypeVar("T")
Receive = Any  # ASGI callables, as Starlette types them
Send = Any

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
STALL_S = 30.0  # a client that takes nothing for this long is cut off

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies that buffer would hold tokens back
}


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break (compact JSON never does)."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """An ASGI response that sends what `body` yields until it ends or the client is gone."""

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`on_close` is called in every case, also when `body` was never begun."""
        self._body, self._on_close = body, on_close
        self._keep_alive_s = keep_alive_s
        self._headers = _HEADERS | dict(headers or {})
        self._sent_at = 0.0
        self._is_sending = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Send it all, and comments in between."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        parts = [
            loop.create_task(self._send_all(send)),
            loop.create_task(until_disconnect(receive)),
            loop.create_task(self._comment(send)),
        ]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            self._on_close()
            await self._body.aclose()
        if not parts[0].cancelled() and parts[0].exception() is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self._body:
            await self._put(send, chunk)

    async def _put(self, send: Send, chunk: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False
        self._sent_at = asyncio.get_running_loop().time()

    async def _comment(self, send: Send) -> None:
        """Say that we live after each silence; return when the client takes nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(self._sent_at + self._keep_alive_s - loop.time(), 0.05))
            silent_s = loop.time() - self._sent_at
            if self._is_sending:
                if silent_s > STALL_S:
                    return
            elif silent_s >= self._keep_alive_s:
                await self._put(send, COMMENT)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it when the client leaves.

    Raises:
        Cancelled: the client left.
    """
    task = asyncio.ensure_future(work)
    eye = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, eye}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client left")
        return task.result()
    finally:
        eye.cancel()
        task.cancel()
        await asyncio.gather(eye, task, return_exceptions=True)
