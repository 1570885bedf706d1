"""The OpenAPI page, made of the types that read bodies and write replies, so that it is right.

Knows the public paths and nothing of how they are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from router.schema.anthropic import CountBody, MessagesBody
from router.schema.anthropic_replies import (
    CountReply,
    MessageErrorReply,
    MessageEvent,
    MessageReply,
)
from router.schema.chat import ChatBody
from router.schema.completions import CompletionBody
from router.schema.replies import (
    ChatChunk,
    ChatCompletion,
    DetokenizeReply,
    ErrorReply,
    HealthReply,
    ModelOut,
    ModelsReply,
    TextCompletion,
    TokenizeReply,
)
from router.schema.response_replies import ResponseEvent, ResponseReply
from router.schema.responses import ResponsesBody
from router.schema.tokenize import DetokenizeBody, TokenizeBody

REF = "#/components/schemas/{name}"
REFUSALS = {
    400: "A field or the body is wrong.",
    401: "An API key is needed, or this one is not known.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Queues are full, or the key has used its share. `Retry-After` says when to come back.",
    500: "A fault of the server's own.",
    503: "Not ready, or a part of the service stopped.",
    504: "The request took too long.",
}
IGNORED = {
    "X-Baton-Ignored": {
        "description": "Names of the body's fields that had no effect.",
        "schema": {"type": "string"},
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One public path. `events` is what the data of a stream's events may be."""

    path: str
    summary: str
    reply: Any
    body: type[msgspec.Struct] | None = None
    events: Sequence[Any] = ()
    error: type[msgspec.Struct] = ErrorReply
    refusals: Sequence[int] = field(default=tuple(REFUSALS))


PAGES = (
    Page(
        path="/v1/chat/completions",
        summary="Answer a conversation",
        body=ChatBody,
        reply=ChatCompletion,
        events=(ChatChunk, ErrorReply),
    ),
    Page(
        path="/v1/completions",
        summary="Continue a text",
        body=CompletionBody,
        reply=TextCompletion,
        events=(TextCompletion, ErrorReply),
    ),
    Page(
        path="/v1/responses",
        summary="Answer items; nothing is kept",
        body=ResponsesBody,
        reply=ResponseReply,
        events=(ResponseEvent,),
    ),
    Page(
        path="/v1/messages",
        summary="Answer a conversation, in Anthropic's form",
        body=MessagesBody,
        reply=MessageReply,
        events=(MessageEvent, MessageErrorReply),
        error=MessageErrorReply,
    ),
    Page(
        path="/v1/messages/count_tokens",
        summary="Count a prompt's tokens, in Anthropic's form",
        body=CountBody,
        reply=CountReply,
        error=MessageErrorReply,
        refusals=(400, 401, 404, 408, 413, 429, 500),
    ),
    Page(
        path="/tokenize",
        summary="Ids of a text",
        body=TokenizeBody,
        reply=TokenizeReply,
        refusals=(400, 401, 408, 413, 429, 500),
    ),
    Page(
        path="/detokenize",
        summary="Text of ids",
        body=DetokenizeBody,
        reply=DetokenizeReply,
        refusals=(400, 401, 408, 413, 429, 500),
    ),
    Page(
        path="/v1/models",
        summary="What is served",
        reply=ModelsReply,
        refusals=(401, 429, 500),
    ),
    Page(
        path="/v1/models/{model}",
        summary="One model that is served",
        reply=ModelOut,
        refusals=(401, 404, 429, 500),
    ),
    Page(
        path="/health", summary="Whether this process answers", reply=HealthReply, refusals=(500,)
    ),
    Page(
        path="/ready",
        summary="Whether a request would be served",
        reply=HealthReply,
        refusals=(500, 503),
    ),
)


@cache
def openapi_page() -> bytes:
    """The page as JSON."""
    return msgspec.json.encode(openapi())


def openapi() -> dict[str, Any]:
    """The page: OpenAPI 3.1, every path with its body, its replies and its refusals."""
    kinds = [kind for page in PAGES for kind in _kinds(page)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    found = dict(zip([_key(kind) for kind in kinds], schemas, strict=True))
    components["MessageItem"]["required"].remove("type")  # see schema/responses_chat.py
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "Fields that are not listed are passed over and named in the header "
            "`X-Baton-Ignored`, unless passing them over would change what an answer means.",
        },
        "paths": {page.path: _path(page, found) for page in PAGES},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _kinds(page: Page) -> list[Any]:
    kinds = (page.body, page.reply, *page.events, page.error)
    return [kind for kind in kinds if kind is not None]


def _key(kind: Any) -> str:
    return repr(kind)


def _path(page: Page, found: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": found[_key(page.reply)]}}
    if page.events:
        events = [found[_key(kind)] for kind in page.events]
        content["text/event-stream"] = {"schema": {"anyOf": events}}
    refusal = {"application/json": {"schema": found[_key(page.error)]}}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in page.refusals:
        answers[str(status)] = {"description": REFUSALS[status], "content": refusal}
    name = page.path.strip("/").replace("v1/", "").replace("/", "_")
    told: dict[str, Any] = {"operationId": name, "summary": page.summary, "responses": answers}
    if "{model}" in page.path:
        text = {"type": "string", "minLength": 1}
        told["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": text}]
    if page.body is None:
        return {"get": told}
    body = {"application/json": {"schema": found[_key(page.body)]}}
    answers["200"]["headers"] = IGNORED
    return {"post": told | {"requestBody": {"required": True, "content": body}}}
