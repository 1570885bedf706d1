"""What clients get back: whole replies, stream chunks and their parts, in OpenAI's shapes.

A field without a default is always written; one with a default is left out while it has it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all replies."""


class FunctionOut(Reply, frozen=True, kw_only=True):
    """A call's function; in a stream, a piece of it."""

    arguments: str
    name: str | None = None


class CallOut(Reply, frozen=True, kw_only=True):
    """A tool call of a whole reply."""

    id: str
    function: FunctionOut
    type: str


class CallDelta(Reply, frozen=True, kw_only=True):
    """A piece of a tool call. The first of a call carries id, type and name."""

    index: int
    function: FunctionOut
    id: str | None = None
    type: str | None = None


class TopLogprob(Reply, frozen=True, kw_only=True):
    """One of the best tokens at a position. `bytes` is null for control tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Reply, frozen=True, kw_only=True):
    """The token at a position, and the best ones there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class Logprobs(Reply, frozen=True, kw_only=True):
    """One entry for every generated token: reasoning, markers and the end included."""

    content: list[TokenLogprob]


class MessageOut(Reply, frozen=True, kw_only=True):
    """The assistant's message. Reasoning stands apart from content."""

    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallOut] | None = None


class Choice(Reply, frozen=True, kw_only=True):
    """One choice of a whole reply."""

    index: int
    message: MessageOut
    logprobs: Logprobs | None
    finish_reason: FinishReason


class PromptDetails(Reply, frozen=True, kw_only=True):
    """Of the prompt's tokens: how many came from a cache, how many stand for images."""

    cached_tokens: int
    image_tokens: int


class CompletionDetails(Reply, frozen=True, kw_only=True):
    """Of the answer's tokens: how many were reasoning."""

    reasoning_tokens: int


class Usage(Reply, frozen=True, kw_only=True):
    """Tokens of the request, each counted once. The answer's are those of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatCompletion(Reply, frozen=True, kw_only=True):
    """Reply of `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class DeltaOut(Reply, frozen=True, kw_only=True):
    """What is new in a chunk."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Reply, frozen=True, kw_only=True):
    """One choice's share of a chunk."""

    index: int
    delta: DeltaOut
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None


class ChatChunk(Reply, frozen=True, kw_only=True):
    """One event of a streamed chat reply. `usage` is absent unless the request asked for it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TextLogprobs(Reply, frozen=True, kw_only=True):
    """Logprobs in the older form: lists that run in step."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Reply, frozen=True, kw_only=True):
    """One choice of `/v1/completions`, whole or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(Reply, frozen=True, kw_only=True):
    """Reply, or one event of the streamed reply, of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TokenizeReply(Reply, frozen=True, kw_only=True):
    """Reply of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(Reply, frozen=True, kw_only=True):
    """Reply of `/detokenize`."""

    prompt: str


class ModelOut(Reply, frozen=True, kw_only=True):
    """A model that is served. `max_model_len` is its context in tokens."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelsReply(Reply, frozen=True, kw_only=True):
    """Reply of `/v1/models`."""

    object: str
    data: list[ModelOut]


class HealthReply(Reply, frozen=True, kw_only=True):
    """Reply of `/health` and `/ready`."""

    status: str


class ErrorOut(Reply, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply, frozen=True, kw_only=True):
    """Body of every answer with a status of 400 and above, and of an error inside a stream."""

    error: ErrorOut


def encode(reply: Reply | dict[str, Any]) -> bytes:
    """A reply as JSON."""
    return msgspec.json.encode(reply)
