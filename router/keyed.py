"""One key in front of the operator's pages.

Scrapers send it as a bearer token; browsers ask for it as the password of HTTP's basic scheme,
which also works for the stream of events. Without a key in the settings everyone who reaches the
listener may look, and it stays on loopback.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class Keyed:
    """An ASGI app around the admin app."""

    def __init__(self, app: ASGIApp, key_hash: str) -> None:
        """`key_hash`: SHA-256 of the key in hex, or empty."""
        self._app, self._hash = app, key_hash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or ask for the key."""
        if scope["type"] != "http" or not self._hash or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        asking = {"WWW-Authenticate": 'Basic realm="Baton", charset="UTF-8"'}
        reply = PlainTextResponse("the key of this listener is needed\n", 401, headers=asking)
        await reply(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        kind, _, said = headers.get("authorization", "").partition(" ")
        key = said.strip() if kind.lower() == "bearer" else _password(said)
        return hmac.compare_digest(hashlib.sha256(key.encode()).hexdigest(), self._hash)


def _password(credentials: str) -> str:
    try:
        pair = base64.b64decode(credentials.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]
