"""The public paths. Each handler reads, orders, and answers from a journey's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import ServingError
from router.access import Access
from router.bodies import origin_of, read_body
from router.desk import ChatOrder, Desk
from router.door import Door
from router.faults import describe, fault
from router.house import House
from router.journey import Journey
from router.readiness import Readiness
from router.replies import ChatAnswer, new_head
from router.schema import ignored_header
from router.schema.replies import encode
from router.stream import DONE, EventStream, event, while_connected
from router.text_routes import TextPages


def public_app(desk: Desk, house: House, readiness: Readiness) -> Any:
    """The ASGI app of the public listener."""
    pages = _Pages(desk, house, readiness)
    texts = TextPages(desk, house, readiness)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", pages.chat, methods=["POST"]),
            Route("/v1/completions", texts.completions, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/tokenize", texts.tokenize, methods=["POST"]),
            Route("/detokenize", texts.detokenize, methods=["POST"]),
            Route("/health", pages.health),
            Route("/ready", pages.ready),
        ],
        exception_handlers={
            HTTPException: _unrouted,
            ServingError: _refused,
            Exception: _refused,  # then it is raised again, for the door to log
        },
    )
    app.router.redirect_slashes = False
    return Door(app, desk.settings.server, Access(desk.settings.access), house.tally)


class _Pages:
    def __init__(self, desk: Desk, house: House, readiness: Readiness) -> None:
        self._desk, self._house, self._readiness = desk, house, readiness

    async def health(self, _: Request) -> Response:
        """Alive: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Ready: a pair of rooms has passed its probe in this epoch, and both answer."""
        self._demand_ready()
        return JSONResponse({"status": "ready"})

    async def models(self, _: Request) -> Response:
        """What is served."""
        limits = self._desk.limits
        rows = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "baton",
                "max_model_len": limits.context,
            }
            for name in sorted(limits.models)
        ]
        return JSONResponse({"object": "list", "data": rows})

    async def chat(self, request: Request) -> Any:
        """`POST /v1/chat/completions`, whole or streamed."""
        body = await read_body(request, self._desk.settings.server.body_limit_bytes)
        asked = await self._desk.read_chat(body)
        self._demand_ready()
        origin = origin_of(request)
        order = await while_connected(request.receive, self._desk.order_chat(asked, origin))
        headers = {"X-Baton-Ignored": ignored_header(asked.ignored)} if asked.ignored else {}
        journey = Journey(order.task, self._house)
        if asked.stream:
            return await self._streamed(request, order, journey, headers)
        reply = await while_connected(request.receive, self._whole(order, journey))
        return Response(reply, media_type="application/json", headers=headers)

    async def _whole(self, order: ChatOrder, journey: Journey) -> bytes:
        answer = self._answer(order)
        async with journey:
            async for item in journey.events():
                answer.take(item)
                if answer.is_complete:  # by a stop string, the rooms may still be at work
                    journey.enough()
        return encode(answer.whole(_usage(answer, order, journey)))

    async def _streamed(
        self, request: Request, order: ChatOrder, journey: Journey, headers: dict[str, str]
    ) -> EventStream:
        journey.set_out()
        try:  # until a room has place for it, a refusal is an HTTP status and not an event
            await while_connected(request.receive, journey.admitted())
        except BaseException:
            journey.turn_back()
            raise
        return EventStream(
            self._events(order, journey),
            on_close=journey.turn_back,
            keep_alive_s=self._desk.settings.server.keep_alive_s,
            headers=headers,
        )

    async def _events(self, order: ChatOrder, journey: Journey) -> AsyncGenerator[bytes, None]:
        answer = self._answer(order)
        yield b"".join(event(encode(chunk)) for chunk in answer.opening())
        try:
            async for item in journey.events():
                if chunks := answer.chunks(item):
                    yield b"".join([event(encode(chunk)) for chunk in chunks])
                if answer.is_complete:
                    journey.enough()
        except ServingError as error:  # never a success reason, never [DONE]
            yield event(encode(describe(error).body))
            return
        used = _usage(answer, order, journey)
        yield b"".join([event(encode(chunk)) for chunk in answer.closing(used)]) + DONE

    def _answer(self, order: ChatOrder) -> ChatAnswer:
        return ChatAnswer(order.request, self._desk.tokenizer, new_head(order.request.model))

    def _demand_ready(self) -> None:
        self._readiness.demand()


def _usage(answer: ChatAnswer, order: ChatOrder, journey: Journey) -> Any:
    return answer.usage(
        prompt=len(order.task.token_ids),
        cached=journey.account.cached_tokens,
        image=order.image_tokens,
    )


async def _refused(_: Request, error: Exception) -> Response:
    told = describe(error)
    return JSONResponse(told.body, status_code=told.status, headers=told.headers)


async def _unrouted(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    if status == 405:
        told = fault(
            405, f"{request.method} is not offered on this path", code="method_not_allowed"
        )
        return JSONResponse(told.body, status_code=405, headers=getattr(error, "headers", None))
    told = fault(404, f"the path `{request.url.path[:200]}` is not served here", code="not_found")
    return JSONResponse(told.body, status_code=404)
