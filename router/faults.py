"""Errors to HTTP: status, OpenAI-style body and headers, in one table.

A client reads sentences, never an exception's name or a trace. What went wrong inside (a status of
500 and above) is told in general terms; the log has the particulars under the request's id.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import BodyTooLarge, InvalidRequest, NotFound, ServingError
from common.observe.logs import client_id, request_id

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled",
    503: "service_unavailable",
    504: "timeout",
}

INSIDE = {
    "not_ready": "the server starts, stops or replaces a part; send the request again shortly",
    "room_lost": "a part of the service stopped while it worked on the request; send it again",
    "transfer_failed": "the request could not be handed on inside the service; send it again",
    "handoff_refused": "the request could not be handed on inside the service; send it again",
    "non_finite": "the model produced a value that is not a number; the request was ended",
    "deadline_exceeded": "the request took longer than it may",
}
UNEXPECTED = "something unexpected happened; the log has it under the request's id"

HALF_READ = (408, 413, 414, 431)  # the rest of such a request is of no use to anybody
RETRY_AFTER_S = {429: 1, 503: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error as HTTP sees it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> dict[str, Any]:
        """The inner object: message, type, param, code."""
        inner: dict[str, Any] = self.body["error"]
        return inner


def describe(error: BaseException) -> Fault:
    """Status, body and headers for an error of ours or anybody's."""
    if not isinstance(error, ServingError):
        return fault(500, UNEXPECTED, code="internal_error")
    param = getattr(error, "param", None)
    if isinstance(error, InvalidRequest | NotFound | BodyTooLarge) or error.status < 500:
        code = "model_not_found" if isinstance(error, NotFound) and param == "model" else error.code
        return fault(error.status, str(error), code=code, param=param, retryable=error.retryable)
    message = INSIDE.get(error.code, UNEXPECTED)
    return fault(error.status, message, code=error.code, retryable=error.retryable)


def fault(
    status: int, message: str, *, code: str, param: str | None = None, retryable: bool = False
) -> Fault:
    """Build a fault; retryable ones say when to come back."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {"Retry-After": str(RETRY_AFTER_S.get(status, 1))} if retryable else {}
    if status in HALF_READ:
        headers["Connection"] = "close"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Fault(status=status, body=body, headers=headers)


# Anthropic's names of kinds of errors, where they are not ours.
ANTHROPIC_TYPES = {
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_PATHS = "/v1/messages"


def anthropic_body(told: Fault) -> dict[str, Any]:
    """A fault's body in Anthropic's shape."""
    kind = ANTHROPIC_TYPES.get(told.status, told.error["type"])
    param, message = told.error["param"], told.error["message"]
    if param and param not in message:  # there is no other place for it
        message = f"`{param}`: {message}"
    inner = {"type": kind, "message": message}
    return {"type": "error", "error": inner, "request_id": client_id.get() or request_id.get()}


def on_path(path: str, told: Fault) -> Fault:
    """A fault in the shape of the API that owns the path."""
    if path == ANTHROPIC_PATHS or path.startswith(ANTHROPIC_PATHS + "/"):
        return replace(told, body=anthropic_body(told))
    return told
