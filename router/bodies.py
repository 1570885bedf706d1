"""What comes with a request: its body, read within a limit, and where it comes from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from common.config.settings import ServerSettings
from common.errors import BodyTooLarge, Cancelled, TooSlow
from common.observe.logs import request_id
from router.tracing import TRACE

TENANT = "baton.tenant"  # in an ASGI scope: the name of the request's API key
LEAST_RATE = 64 << 10  # bytes a second, of a body that takes longer than its first patience


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


async def read_body(request: Request, bounds: ServerSettings) -> bytes:
    """The body, read no further than the limit and no longer than its size deserves.

    Raises:
        BodyTooLarge: it is longer, or says so.
        TooSlow: it comes too slowly.
        Cancelled: the client left while sending.
    """
    limit, since = bounds.body_limit_bytes, asyncio.get_running_loop().time()
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise BodyTooLarge(f"the request body has {told} bytes; at most {limit} are accepted")
    body = bytearray()
    try:
        async with asyncio.timeout_at(since + bounds.read_s) as clock:
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise BodyTooLarge(
                        f"the request body has more than {limit} bytes, the limit here"
                    )
                clock.reschedule(since + bounds.read_s + len(body) / LEAST_RATE)
    except TimeoutError:
        raise TooSlow(
            f"after {len(body)} bytes the rest of the request body did not arrive in time"
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client left while it sent its request") from None
    return bytes(body)
