"""A client's trace context, read as W3C has it; what is malformed is as if it were not there.

Knows headers and nothing of spans; those are made in `common/observe/otlp.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TRACE = "baton.trace"  # in an ASGI scope: the traceparent that the rooms are told
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NEVER = "ff"  # the version that no version will have
_SAMPLED, _RANDOM = 1, 2  # flags: the trace is kept; its id is random
_STATE_LIMIT = 512  # characters of `tracestate` that are passed on


def read_trace(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, str]:
    """The `traceparent`, in the form of version 00, and the `tracestate` of a request.

    Both are empty when the first is absent, malformed or there twice. Headers as ASGI has them:
    names in lower case.
    """
    values: dict[bytes, list[str]] = {b"traceparent": [], b"tracestate": []}
    for name, value in headers:
        if name in values:
            values[name].append(value.decode("latin-1").strip())
    said = values[b"traceparent"]
    parts = _FORM.fullmatch(said[0]) if len(said) == 1 else None
    if parts is None:
        return "", ""
    version, trace, span, flags, more = parts.groups()
    is_wrong = version == _NEVER or (version == "00" and more is not None)
    if is_wrong or not int(trace, 16) or not int(span, 16):
        return "", ""
    state = ",".join(values[b"tracestate"])
    known = int(flags, 16) & (_SAMPLED | _RANDOM)
    return f"00-{trace}-{span}-{known:02x}", state if len(state) <= _STATE_LIMIT else ""


def is_kept(traceparent: str) -> bool:
    """Whether spans of this trace are wanted."""
    return bool(traceparent) and bool(int(traceparent[53:], 16) & _SAMPLED)


def trace_of(traceparent: str) -> str:
    """The trace's id, 32 digits; empty where there is none."""
    return traceparent[3:35]
