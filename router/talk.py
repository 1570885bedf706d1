"""A conversation's answer through one journey, whole or streamed, whatever API it is told in.

Knows the order of things: nothing is sent before a room has place, an answer that is complete stops
the rooms, an error inside a stream is told and ends it. What is said is the teller's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from common.errors import ServingError
from router.faults import describe
from router.house import House
from router.jobs import Task
from router.journey import Journey
from router.schema import ignored_header
from router.stream import EventStream, while_connected
from router.teller import Spent, Teller


class Talk:
    """One answer on its way to the client."""

    def __init__(self, teller: Teller, task: Task, house: House, *, keep_alive_s: float) -> None:
        """`teller` says what `task` brings."""
        self._teller, self._task = teller, task
        self._journey = Journey(task, house)
        self._keep_alive_s = keep_alive_s

    async def whole(self, request: Request, headers: Mapping[str, str]) -> Response:
        """The reply in one piece.

        Raises:
            ServingError: the request could not be finished, or the client left.
        """
        reply = await while_connected(request.receive, self._gather())
        return Response(reply, media_type="application/json", headers=headers)

    async def streamed(self, request: Request, headers: Mapping[str, str]) -> EventStream:
        """The reply as events.

        Raises:
            ServingError: it ended before a room had place for it, so that this is an HTTP status.
        """
        self._journey.set_out()
        try:
            await while_connected(request.receive, self._journey.admitted())
        except BaseException:
            self._journey.turn_back()
            raise
        return EventStream(
            self._events(),
            on_close=self._journey.turn_back,
            keep_alive_s=self._keep_alive_s,
            headers=headers,
        )

    async def _gather(self) -> bytes:
        async with self._journey as journey:
            async for item in journey.events():
                self._teller.take(item)
                if self._teller.is_complete:  # by a stop string, the rooms may still be at work
                    journey.enough()
        return self._teller.whole(self._spent())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield self._teller.opening()
        try:
            async for item in self._journey.events():
                if told := self._teller.more(item):
                    yield told
                if self._teller.is_complete:
                    self._journey.enough()
        except ServingError as error:  # never a success reason
            yield self._teller.broken(describe(error))
            return
        yield self._teller.closing(self._spent())

    def _spent(self) -> Spent:
        return Spent(
            prompt=len(self._task.token_ids),
            cached=self._journey.account.cached_tokens,
            image=sum(ref.tokens for ref, _ in self._task.images),
        )


def ignored_headers(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields without effect, if there were any."""
    return {"X-Baton-Ignored": ignored_header(names)} if names else {}
