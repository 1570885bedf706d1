"""What comes with a request: its body, read within a limit, and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from common.errors import BodyTooLarge, Cancelled
from common.observe.logs import request_id

TENANT = "baton.tenant"  # in an ASGI scope: the name of the request's API key
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a request comes from.

    `name` is unique in this deployment; `tenant` names the API key and `trace` is the client's
    `traceparent`, both empty when there is none.
    """

    name: str
    tenant: str = ""
    trace: str = ""


def origin_of(request: Request) -> Origin:
    """The origin of a request that came through the door; an odd `traceparent` is left out."""
    trace = request.headers.get("traceparent", "")
    return Origin(
        name=request_id.get(),
        tenant=request.scope.get(TENANT, ""),
        trace=trace if TRACEPARENT.fullmatch(trace) else "",
    )


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit` bytes.

    Raises:
        BodyTooLarge: it is longer, or says so.
        Cancelled: the client left while sending.
    """
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise BodyTooLarge(f"the request body has {told} bytes; at most {limit} are accepted")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise BodyTooLarge(f"the request body has more than {limit} bytes, the limit here")
    except ClientDisconnect:
        raise Cancelled("the client left while it sent its request") from None
    return bytes(body)
