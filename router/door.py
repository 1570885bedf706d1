"""Around every public request: its id, limits on headers, and the count of answers.

A client's `X-Request-Id` is repeated in the reply and written to the logs when it is short and
plain. The rooms know a request by an id of this router's own: two clients may choose the same one.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from common.config.settings import ServerSettings
from common.observe.logs import request_id
from common.observe.metrics import Tally
from router.faults import fault
from router.schema.replies import encode

PLAIN_ID = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")

_log = logging.getLogger("baton.door")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


class Door:
    """An ASGI app around the public app."""

    def __init__(self, app: App, settings: ServerSettings, tally: Tally) -> None:
        """`settings` gives the limits."""
        self._app, self._settings, self._tally = app, settings, tally

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        own = f"req-{secrets.token_hex(12)}"
        said = dict(scope["headers"]).get(b"x-request-id", b"")
        echoed = said if PLAIN_ID.fullmatch(said) else own.encode()
        token = request_id.set(own)

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", echoed)]
                self._tally.add("baton_http_responses_total", status=str(message["status"]))
            await send(message)

        try:
            size = sum(len(name) + len(value) for name, value in scope["headers"])
            if size > self._settings.header_limit_bytes:
                await self._refuse(answer, size)
            else:
                await self._app(scope, receive, answer)
        finally:
            request_id.reset(token)

    async def _refuse(self, answer: Send, size: int) -> None:
        limit = self._settings.header_limit_bytes
        told = fault(
            431, f"the headers have {size} bytes; at most {limit} are accepted", code="headers"
        )
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await answer({"type": "http.response.start", "status": 431, "headers": headers})
        await answer({"type": "http.response.body", "body": encode(told.body)})
