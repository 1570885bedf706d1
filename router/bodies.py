"""A request's body, read within its limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from common.errors import BodyTooLarge, Cancelled


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
