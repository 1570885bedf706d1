"""What comes with a request: its body, read within a limit, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from common.errors import BodyTooLarge, Cancelled
from common.observe.logs import request_id
from router.tracing import TRACE

TENANT = "baton.tenant"  # in an ASGI scope: the name of the request's API key


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a request comes from.

    `name` is unique in this deployment; `tenant` names the API key and `trace` is the
    `traceparent` of the call, both empty when there is none.
    """

    name: str
    tenant: str = ""
    trace: str = ""


def origin_of(request: Request) -> Origin:
    """The origin of a request that came through the door."""
    return Origin(
        name=request_id.get(),
        tenant=request.scope.get(TENANT, ""),
        trace=request.scope.get(TRACE, ""),
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
