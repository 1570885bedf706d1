"""OpenAI's path for responses, of which none is kept."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from router.bodies import origin_of, read_body
from router.desk import ChatOrder, Desk
from router.house import House
from router.readiness import Readiness
from router.replies import new_head
from router.response_replies import ResponseAnswer
from router.schema.responses_chat import parse_response
from router.schema.translation import Translated
from router.stream import while_connected
from router.talk import Talk, ignored_headers


class ResponsePages:
    """The handler of this path."""

    def __init__(self, desk: Desk, house: House, readiness: Readiness) -> None:
        """Handlers share the process's desk and house."""
        self._desk, self._house, self._readiness = desk, house, readiness

    async def create(self, request: Request) -> Any:
        """`POST /v1/responses`, whole or streamed."""
        server = self._desk.settings.server
        body = await read_body(request, server)
        asked = await self._desk.read(parse_response, body)
        self._readiness.demand()
        order = await while_connected(request.receive, self._order(asked, request))
        answer = ResponseAnswer(
            order.request,
            self._desk.tokenizer,
            new_head(order.request.model, "resp"),
            raw=asked.raw,
        )
        talk = Talk(answer, order.task, self._house, keep_alive_s=server.keep_alive_s)
        headers = ignored_headers(order.request.ignored)
        return await (talk.streamed if asked.chat.stream else talk.whole)(request, headers)

    async def _order(self, asked: Translated, request: Request) -> ChatOrder:
        with asked.words.told():
            return await self._desk.order_chat(asked.chat, origin_of(request), asked.words.back)
