"""The public paths. Each handler reads, orders, and answers from a journey's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.contract.messages import TokenItem
from common.errors import NotReady, ServingError
from router.access import Access
from router.bodies import origin_of, read_body
from router.desk import Desk
from router.door import Door
from router.faults import Fault, describe, fault, on_path
from router.house import House
from router.message_routes import MessagePages
from router.openapi import openapi_page
from router.readiness import Readiness
from router.replies import ChatAnswer, new_head
from router.response_routes import ResponsePages
from router.schema.replies import ModelOut, ModelsReply, Reply, Usage, encode
from router.schema.sampling import check_model
from router.stream import DONE, event, while_connected
from router.talk import Talk, ignored_headers
from router.teller import Spent
from router.text_routes import TextPages


def public_app(desk: Desk, house: House, readiness: Readiness) -> Any:
    """The ASGI app of the public listener."""
    pages = _Pages(desk, house, readiness)
    texts = TextPages(desk, house, readiness)
    messages = MessagePages(desk, house, readiness)
    responses = ResponsePages(desk, house, readiness)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", pages.chat, methods=["POST"]),
            Route("/v1/completions", texts.completions, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/tokenize", texts.tokenize, methods=["POST"]),
            Route("/detokenize", texts.detokenize, methods=["POST"]),
            Route("/openapi.json", pages.openapi),
            Route("/health", pages.health),
            Route("/ready", pages.ready),
            Route("/-/healthz", pages.healthz),
        ],
        exception_handlers={
            HTTPException: _unrouted,
            ServingError: _refused,
            Exception: _refused,  # then it is raised again, for the door to log
        },
    )
    app.router.redirect_slashes = False
    server = desk.settings.server
    access = Access(desk.settings.access)
    door = Door(app, server, access, house.tally, house.spans, lambda: readiness.is_closing)
    if not server.cors_origins:
        return door
    # Around the door: a browser asks whether it may before it shows a key.
    return CORSMiddleware(
        door,
        allow_origins=server.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "request-id", "retry-after", "x-baton-ignored"),
    )


class _Pages:
    def __init__(self, desk: Desk, house: House, readiness: Readiness) -> None:
        self._desk, self._house, self._readiness = desk, house, readiness

    async def health(self, _: Request) -> Response:
        """Alive: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Ready: a pair of rooms has passed its probe in this epoch, and both answer."""
        self._demand_ready()
        if self._readiness.is_draining:
            raise NotReady("this router is leaving; ask another one")
        return JSONResponse({"status": "ready"})

    async def healthz(self, request: Request) -> Response:
        """`/ready` as Serve's own proxy would say it, for those who know only that one."""
        await self.ready(request)
        return PlainTextResponse("success")

    async def models(self, _: Request) -> Response:
        """What is served."""
        rows = [self._told(name) for name in sorted(self._desk.limits.models)]
        return _json(encode(ModelsReply(object="list", data=rows)))

    async def model(self, request: Request) -> Response:
        """One of them, by its name."""
        name = request.path_params["model"]
        check_model(name, self._desk.limits)
        return _json(encode(self._told(name)))

    def _told(self, name: str) -> ModelOut:
        context = self._desk.limits.context
        return ModelOut(id=name, object="model", created=0, owned_by="baton", max_model_len=context)

    async def openapi(self, _: Request) -> Response:
        """The page that describes all of this."""
        return _json(openapi_page())

    async def chat(self, request: Request) -> Any:
        """`POST /v1/chat/completions`, whole or streamed."""
        body = await read_body(request, self._desk.settings.server)
        asked = await self._desk.read_chat(body)
        self._demand_ready()
        origin = origin_of(request)
        order = await while_connected(request.receive, self._desk.order_chat(asked, origin))
        headers = ignored_headers(asked.ignored)
        answer = ChatAnswer(order.request, self._desk.tokenizer, new_head(asked.model))
        keep_alive_s = self._desk.settings.server.keep_alive_s
        talk = Talk(_ChatTeller(answer), order.task, self._house, keep_alive_s=keep_alive_s)
        return await (talk.streamed if asked.stream else talk.whole)(request, headers)

    def _demand_ready(self) -> None:
        self._readiness.demand()


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class _ChatTeller:
    """A chat's answer as bytes."""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer

    @property
    def is_complete(self) -> bool:
        return self._answer.is_complete

    def take(self, item: TokenItem) -> None:
        self._answer.take(item)

    def whole(self, spent: Spent) -> bytes:
        return encode(self._answer.whole(self._usage(spent)))

    def opening(self) -> bytes:
        return _events(self._answer.opening())

    def more(self, item: TokenItem) -> bytes:
        return _events(self._answer.chunks(item))

    def closing(self, spent: Spent) -> bytes:
        return _events(self._answer.closing(self._usage(spent))) + DONE

    def broken(self, told: Fault) -> bytes:
        return event(encode(told.body))  # and no [DONE]

    def _usage(self, spent: Spent) -> Usage:
        return self._answer.usage(prompt=spent.prompt, cached=spent.cached, image=spent.image)


def _events(chunks: Sequence[Reply]) -> bytes:
    return b"".join([event(encode(chunk)) for chunk in chunks])


async def _refused(request: Request, error: Exception) -> Response:
    told = on_path(request.url.path, describe(error))
    return JSONResponse(told.body, status_code=told.status, headers=told.headers)


async def _unrouted(request: Request, error: Exception) -> Response:
    path = request.url.path
    headers = None
    if getattr(error, "status_code", 500) == 405:
        headers = getattr(error, "headers", None)
        told = fault(
            405, f"{request.method} is not offered on this path", code="method_not_allowed"
        )
    else:
        told = fault(404, f"the path `{path[:200]}` is not served here", code="not_found")
    return JSONResponse(on_path(path, told).body, status_code=told.status, headers=headers)
