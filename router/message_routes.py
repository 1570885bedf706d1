"""Anthropic's paths: messages, and a count of a prompt's tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.bodies import origin_of, read_body
from router.desk import ChatOrder, Desk
from router.house import House
from router.message_replies import MessageAnswer
from router.readiness import Readiness
from router.replies import new_head
from router.schema.anthropic_chat import parse_count, parse_messages
from router.schema.anthropic_replies import CountReply
from router.schema.replies import encode
from router.schema.translation import Translated
from router.stream import while_connected
from router.talk import Talk, ignored_headers


class MessagePages:
    """Handlers of these paths. The header `anthropic-version` is not looked at."""

    def __init__(self, desk: Desk, house: House, readiness: Readiness) -> None:
        """Handlers share the process's desk and house."""
        self._desk, self._house, self._readiness = desk, house, readiness

    async def create(self, request: Request) -> Any:
        """`POST /v1/messages`, whole or streamed."""
        server = self._desk.settings.server
        body = await read_body(request, server)
        asked = await self._desk.read(parse_messages, body)
        self._readiness.demand()
        order = await while_connected(request.receive, self._order(asked, request))
        answer = MessageAnswer(
            order.request,
            self._desk.tokenizer,
            new_head(order.request.model, "msg"),
            prompt_tokens=len(order.task.token_ids),
        )
        talk = Talk(answer, order.task, self._house, keep_alive_s=server.keep_alive_s)
        headers = ignored_headers(order.request.ignored)
        return await (talk.streamed if asked.chat.stream else talk.whole)(request, headers)

    async def count(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`: tokens of the prompt, images included."""
        body = await read_body(request, self._desk.settings.server)
        asked = await self._desk.read(parse_count, body)
        with asked.words.told():
            count = await while_connected(request.receive, self._desk.count_chat(asked.chat))
        reply = encode(CountReply(input_tokens=count))
        headers = ignored_headers(asked.chat.ignored)
        return Response(reply, media_type="application/json", headers=headers)

    async def _order(self, asked: Translated, request: Request) -> ChatOrder:
        with asked.words.told():
            return await self._desk.order_chat(asked.chat, origin_of(request), asked.words.back)
