"""The paths that work on plain text: completions, and a look through the tokenizer.

Several prompts are several journeys, answered as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.contract.messages import TokenItem
from common.errors import ServingError
from router.bodies import origin_of, read_body
from router.desk import Desk
from router.faults import describe
from router.house import House
from router.jobs import Task
from router.journey import Journey
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
        body = await read_body(request, self._desk.settings.server.body_limit_bytes)
        asked = await self._desk.read_text(body)
        self._readiness.demand()
        tasks = await self._desk.order_text(asked, origin_of(request))
        headers = {"X-Baton-Ignored": ignored_header(asked.ignored)} if asked.ignored else {}
        journeys = [Journey(task, self._house) for task in tasks]
        answer = self._answer(asked, tasks)
        for journey in journeys:
            journey.set_out()
        try:
            if not asked.stream:
                reply = await while_connected(request.receive, _whole(answer, journeys))
                return Response(reply, media_type="application/json", headers=headers)
            await while_connected(request.receive, _admitted(journeys))
        except BaseException:
            _turn_back(journeys)
            raise
        return EventStream(
            _events(answer, journeys),
            on_close=lambda: _turn_back(journeys),
            keep_alive_s=self._desk.settings.server.keep_alive_s,
            headers=headers,
        )

    def _answer(self, asked: CompletionRequest, tasks: Sequence[Task]) -> TextAnswer:
        prompts = [task.token_ids for task in tasks]
        return TextAnswer(asked, prompts, self._desk.tokenizer, new_head(asked.model, "cmpl"))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the ids of a text; what looks like a control token is text."""
        body = await read_body(request, self._desk.settings.server.body_limit_bytes)
        asked = convert_object(decode_object(body), TokenizeBody)
        ids = await asyncio.to_thread(self._desk.tokenizer.encode, asked.prompt)
        reply = TokenizeReply(
            tokens=list(ids), count=len(ids), max_model_len=self._desk.limits.context
        )
        return Response(encode(reply), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of ids, control tokens by name."""
        body = await read_body(request, self._desk.settings.server.body_limit_bytes)
        asked = convert_object(decode_object(body), DetokenizeBody)
        ids = checked_ids(asked.tokens, self._desk.limits)
        text = await asyncio.to_thread(self._desk.tokenizer.decode, ids)
        return Response(encode(DetokenizeReply(prompt=text)), media_type="application/json")


def _turn_back(journeys: Sequence[Journey]) -> None:
    for journey in journeys:
        journey.turn_back()


async def _admitted(journeys: Sequence[Journey]) -> None:
    for journey in journeys:
        await journey.admitted()


def _cached(journeys: Sequence[Journey]) -> int:
    return sum(journey.account.cached_tokens for journey in journeys)


async def _whole(answer: TextAnswer, journeys: Sequence[Journey]) -> bytes:
    async for prompt, item in _together(journeys):
        answer.take(prompt, item)
        if answer.has_enough_of(prompt):
            journeys[prompt].enough()
    _turn_back(journeys)
    return encode(answer.whole(answer.usage(cached=_cached(journeys))))


async def _events(answer: TextAnswer, journeys: Sequence[Journey]) -> AsyncGenerator[bytes, None]:
    yield b"".join(event(encode(chunk)) for chunk in answer.opening())
    try:
        async for prompt, item in _together(journeys):
            if chunks := answer.chunks(prompt, item):
                yield b"".join(event(encode(chunk)) for chunk in chunks)
            if answer.has_enough_of(prompt):
                journeys[prompt].enough()
    except ServingError as error:
        yield event(encode(describe(error).body))
        return
    used = answer.usage(cached=_cached(journeys))
    yield b"".join(event(encode(chunk)) for chunk in answer.closing(used)) + DONE


async def _together(journeys: Sequence[Journey]) -> AsyncIterator[tuple[int, TokenItem]]:
    """Events of all journeys as they come, each with its prompt's number.

    Raises:
        ServingError: one of the journeys cannot be finished.
    """
    ready: asyncio.Queue[tuple[int, TokenItem] | ServingError | None] = asyncio.Queue(256)

    async def read(prompt: int, journey: Journey) -> None:
        try:
            async for item in journey.events():
                await ready.put((prompt, item))
            await ready.put(None)
        except ServingError as error:
            await ready.put(error)

    readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(journeys)]
    try:
        left = len(readers)
        while left:
            arrived = await ready.get()
            if isinstance(arrived, ServingError):
                raise arrived
            if arrived is None:
                left -= 1
            else:
                yield arrived
    finally:
        for reader in readers:
            reader.cancel()
