"""Structured log lines: one JSON object each, with the request's id from a context variable.

Every line has the room that wrote it, and where it is about a request that one's id, the id its
client gave it and its trace's.

Lines say what happened to a request, never what it says: no prompt, no token, no key, no image.
`note` takes only numbers, booleans and short words, so that content cannot slip in by accident.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
import traceback
from typing import Any

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
client_id: contextvars.ContextVar[str] = contextvars.ContextVar("client_id", default="")
trace_id: contextvars.ContextVar[str] = contextvars.ContextVar("trace_id", default="")
WORD_LIMIT = 200  # characters of one value; a longer one is cut

_EXTRA = "baton_fields"


class JsonLines(logging.Formatter):
    """Format a record as one JSON object on one line.

    An exception is written by its type and its stack. The router reads words, and what an exception
    says there may quote them, so its message is left out.
    """

    def __init__(self, room: str, replica: str = "") -> None:
        """`room` and `replica` stand in every line."""
        super().__init__()
        self._quotes = room != "router"
        self._who = {"room": room, "replica": replica} if replica else {"room": room}

    def format(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, event, who, request id, then the event's own fields."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self._who,
        }
        if request := request_id.get():
            line["request"] = request
        if client := client_id.get():  # what the client calls it
            line["client_request"] = client
        if trace := trace_id.get():
            line["trace"] = trace
        line |= getattr(record, _EXTRA, {})
        if record.exc_info:
            line["exception"] = self._stack(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)

    def _stack(self, error: BaseException | None) -> str:
        told: list[str] = []
        while error is not None:
            name = type(error).__qualname__
            told += [f"{name}: {error}\n" if self._quotes else f"{name}\n"]
            told += traceback.format_tb(error.__traceback__)
            error = error.__cause__ or error.__context__
        return "".join(told)


def note(
    logger: logging.Logger, level: int, event: str, **fields: str | int | float | bool | None
) -> None:
    """Write one line: `event` is a fixed sentence, everything that varies is a field."""
    if logger.isEnabledFor(level):
        short = {k: v[:WORD_LIMIT] if isinstance(v, str) else v for k, v in fields.items()}
        logger.log(level, event, extra={_EXTRA: short})


def start_logging(room: str, replica: str = "", *, level: int = logging.INFO) -> None:
    """Send this process's `baton` loggers, and OpenTelemetry's, to stderr as JSON lines.

    To the process's own stderr: Serve puts a stream in its place that wraps lines in its own form.
    """
    handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)
    handler.setFormatter(JsonLines(room, replica))
    for name in ("baton", "opentelemetry"):
        root = logging.getLogger(name)
        root.handlers[:] = [handler]
        root.setLevel(level)
        root.propagate = False
