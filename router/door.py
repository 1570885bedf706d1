"""Around every public request: its id, its trace, its key, limits on headers, a count of answers.

A client's `X-Request-Id` is repeated in the reply and written to the logs when it is short and
plain. The rooms know a request by an id of this router's own: two clients may choose the same one.
Nothing is said of other origins: browsers on other sites are kept out unless a proxy lets them in.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from common.config.settings import ServerSettings
from common.errors import NotReady, RateLimited, ServingError, Unauthorized
from common.observe.logs import client_id, request_id, trace_id
from common.observe.metrics import Tally
from common.observe.otlp import Spans, fail, traceparent
from router.access import Access, key_of
from router.bodies import TENANT
from router.faults import Fault, describe, fault, on_path
from router.schema.replies import encode
from router.tracing import TRACE, read_trace, trace_of

PLAIN_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
ID_HEADERS = (
    b"x-request-id",
    b"request-id",
)  # OpenAI's clients read the first, Anthropic's the other
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # named in spans
OPEN_PATHS = (
    "/health",
    "/ready",
    "/-/healthz",
)  # asked by whoever watches the process, without a key

_log = logging.getLogger("baton.door")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Any, Send], Awaitable[None]]


class Door:
    """An ASGI app around the public app."""

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        access: Access,
        tally: Tally,
        spans: Spans | None = None,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        """`settings` gives the limits, `access` knows the keys; without `spans` none are made.

        While `closing()`, only who watches the process is answered.
        """
        self._app, self._settings, self._closing = app, settings, closing
        self._access, self._tally, self._spans = access, tally, spans

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        said = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        own, plain = f"req-{secrets.token_hex(12)}", PLAIN_ID.fullmatch(said)
        request_id.set(own)  # each request runs in a context of its own
        client_id.set(said if plain else "")
        answer = _Answer(send, said if plain else own, self._tally, scope["path"])
        scope[TRACE], state = read_trace(scope["headers"])
        if self._spans is None or scope["path"] in OPEN_PATHS:
            await self._guarded(scope, receive, answer)
            return
        known = scope["method"] if scope["method"] in METHODS else "_OTHER"
        span = self._spans.begin(
            known, scope[TRACE], state, {"http.request.method": known, "baton.request": own}
        )
        scope[TRACE] = traceparent(span)
        try:
            await self._guarded(scope, receive, answer)
        finally:
            if "endpoint" in scope:  # a path of ours; others may hold anything
                span.update_name(f"{known} {scope['path']}")
                span.set_attribute("http.route", scope["path"])
            span.set_attribute("http.response.status_code", answer.status)
            if answer.status >= 500:
                fail(span, str(answer.status))
            span.end()

    async def _guarded(self, scope: Message, receive: Any, answer: _Answer) -> None:
        trace_id.set(trace_of(scope[TRACE]))
        try:
            self._measure(scope)
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, answer)
                return
            if self._closing():
                raise NotReady("this server is stopping")
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            key = key_of(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
            with self._access.admit(key) as tenant:
                scope[TENANT] = tenant
                await self._app(scope, receive, answer)
        except _HeadersTooLong as error:
            await answer.refuse(fault(431, str(error), code="headers_too_large"))
        except ServingError as error:
            await answer.refuse(describe(error), _headers(error))
        except Exception as error:  # the one place that tells of what nobody foresaw
            _log.exception("a request met a fault of the router")
            await answer.refuse(describe(error))

    def _measure(self, scope: Message) -> None:
        limit = self._settings.header_limit_bytes
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > limit:
            raise _HeadersTooLong(f"the headers have {size} bytes; at most {limit} are accepted")


class _HeadersTooLong(Exception):
    pass


class _Answer:
    """`send`, with the request's id on the reply and a count."""

    def __init__(self, send: Send, echoed: str, tally: Tally, path: str) -> None:
        self._send, self._echoed, self._tally = send, echoed.encode("latin-1"), tally
        self._path = path
        self._has_begun = False
        self.status = 499  # until one is sent: the client left before

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            self.status = message["status"]
            named = [(name, self._echoed) for name in ID_HEADERS]
            message["headers"] = [*message.get("headers", []), *named]
            self._tally.add("baton_http_responses_total", status=str(message["status"]))
        await self._send(message)

    async def refuse(self, told: Fault, extra: dict[str, str] | None = None) -> None:
        """Answer with an error, unless an answer has begun."""
        if self._has_begun:
            return
        body = encode(on_path(self._path, told).body)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= told.headers | (extra or {})
        raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await self({"type": "http.response.start", "status": told.status, "headers": raw})
        await self({"type": "http.response.body", "body": body})


def _headers(error: ServingError) -> dict[str, str]:
    if isinstance(error, RateLimited):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
