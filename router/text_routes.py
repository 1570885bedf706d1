"""The paths that work on plain text: completions, and a look through the tokenizer.

Several prompts are several journeys, answered as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import ServingError
from router.bodies import origin_of, read_body
from router.convoy import Convoy
from router.desk import Desk
from router.faults import describe
from router.house import House
from router.jobs import Task
from router.readiness import Readiness
from router.replies import new_head
from router.schema import CompletionRequest, ignored_header
from router.schema.decoding import convert_object, decode_object
from router.schema.replies import DetokenizeReply, TokenizeReply, encode
from router.schema.tokenize import DetokenizeBody, TokenizeBody, checked_ids
from router.stream import DONE, EventStream, event, while_connected
from router.text_replies import TextAnswer


class TextPages:
    """Handlers of these paths."""

    def __init__(self, desk: Desk, house: House, readiness: Readiness) -> None:
        """Handlers share the process's desk and house."""
        self._desk, self._house, self._readiness = desk, house, readiness

    async def completions(self, request: Request) -> Any:
        """`POST /v1/completions`, whole or streamed."""
        body = await read_body(request, self._desk.settings.server)
        asked = await self._desk.read_text(body)
        self._readiness.demand()
        tasks = await self._desk.order_text(asked, origin_of(request))
        headers = {"X-Baton-Ignored": ignored_header(asked.ignored)} if asked.ignored else {}
        convoy = Convoy(tasks, self._house)
        answer = self._answer(asked, tasks)
        convoy.set_out()
        try:
            if not asked.stream:
                reply = await while_connected(request.receive, _whole(answer, convoy))
                return Response(reply, media_type="application/json", headers=headers)
            await while_connected(request.receive, convoy.journeys[0].admitted())
        except BaseException:
            convoy.turn_back()
            raise
        return EventStream(
            _events(answer, convoy),
            on_close=convoy.turn_back,
            keep_alive_s=self._desk.settings.server.keep_alive_s,
            headers=headers,
        )

    def _answer(self, asked: CompletionRequest, tasks: Sequence[Task]) -> TextAnswer:
        prompts = [task.token_ids for task in tasks]
        return TextAnswer(asked, prompts, self._desk.tokenizer, new_head(asked.model, "cmpl"))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the ids of a text; what looks like a control token is text."""
        body = await read_body(request, self._desk.settings.server)
        asked = convert_object(decode_object(body), TokenizeBody)
        ids = await asyncio.to_thread(self._desk.tokenizer.encode, asked.prompt)
        reply = TokenizeReply(
            tokens=list(ids), count=len(ids), max_model_len=self._desk.limits.context
        )
        return Response(encode(reply), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of ids, control tokens by name."""
        body = await read_body(request, self._desk.settings.server)
        asked = convert_object(decode_object(body), DetokenizeBody)
        ids = checked_ids(asked.tokens, self._desk.limits)
        text = await asyncio.to_thread(self._desk.tokenizer.decode, ids)
        return Response(encode(DetokenizeReply(prompt=text)), media_type="application/json")


async def _whole(answer: TextAnswer, convoy: Convoy) -> bytes:
    async for prompt, item in convoy.events():
        answer.take(prompt, item)
        if answer.has_enough_of(prompt):
            convoy.journeys[prompt].enough()
    convoy.turn_back()
    return encode(answer.whole(answer.usage(cached=convoy.cached_tokens)))


async def _events(answer: TextAnswer, convoy: Convoy) -> AsyncGenerator[bytes, None]:
    yield b"".join(event(encode(chunk)) for chunk in answer.opening())
    try:
        async for prompt, item in convoy.events():
            if chunks := answer.chunks(prompt, item):
                yield b"".join(event(encode(chunk)) for chunk in chunks)
            if answer.has_enough_of(prompt):
                convoy.journeys[prompt].enough()
    except ServingError as error:
        yield event(encode(describe(error).body))
        return
    used = answer.usage(cached=convoy.cached_tokens)
    yield b"".join(event(encode(chunk)) for chunk in answer.closing(used)) + DONE
