"""`/v1/completions`: the body's type, and the checked request made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from common.contract.messages import Sampling
from common.errors import InvalidRequest
from router.schema.decoding import convert_object, decode_object, unknown_fields
from router.schema.limits import RequestLimits
from router.schema.sampling import (
    Id,
    SamplingBody,
    Script,
    ScriptFields,
    check_model,
    check_refused,
    includes_usage,
    stop_strings,
    to_sampling,
    to_script,
)

DEFAULT_MAX_TOKENS = 16  # of this endpoint, as its clients expect
MAX_PROMPTS = 128
FORMS = ("response_format", "structured_outputs", "tools", "tool_choice")  # of a chat's answer


class CompletionBody(SamplingBody, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | Id | list[Id]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked request. Choice c of prompt p has the index p * n + c in the reply."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    priority: int
    script: Script | None
    ignored: tuple[str, ...]


def parse_completion(body: bytes, limits: RequestLimits) -> CompletionRequest:
    """Read and check a completion request.

    Raises:
        InvalidRequest: what is wrong, with the field's path as `param`.
        NotFound: the model is not served here.
    """
    raw = decode_object(body)
    check_refused(raw)
    asked = convert_object(raw, CompletionBody)
    check_model(asked.model, limits)
    for name in FORMS:
        if raw.get(name):
            raise InvalidRequest(
                f"`{name}` is not supported here: ask /v1/chat/completions", param=name
            )
    if asked.suffix:
        raise InvalidRequest("`suffix` is not supported: text is only continued", param="suffix")
    if asked.echo and asked.logprobs is not None:
        raise InvalidRequest(
            "`echo` with `logprobs` is not supported: the prompt's logprobs are not computed",
            param="echo",
        )
    names = unknown_fields(raw, CompletionBody)
    script = None
    if limits.scripted:
        script = to_script(convert_object(raw, ScriptFields), limits.vocab)
        names = tuple(name for name in names if not name.startswith("baton_script"))
    return CompletionRequest(
        model=asked.model,
        prompts=_prompts(asked.prompt, limits),
        echo=bool(asked.echo),
        sampling=to_sampling(asked, limits, asked.logprobs, asked.max_tokens),
        max_tokens=DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        stop=stop_strings(asked.stop),
        stream=bool(asked.stream),
        priority=asked.priority or 0,
        include_usage=includes_usage(asked),
        script=script,
        ignored=names + (("user",) if "user" in raw else ()),
    )


def _prompts(prompt: str | list[Any], limits: RequestLimits) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [prompt]
    elif any(isinstance(item, int) for item in prompt):
        raise InvalidRequest("`prompt` mixes token ids with other prompts", param="prompt")
    else:
        prompts = prompt
    if not 1 <= len(prompts) <= MAX_PROMPTS or not all(prompts):
        raise InvalidRequest(
            f"`prompt` must hold 1 to {MAX_PROMPTS} prompts, none of them empty", param="prompt"
        )
    for ids in prompts:
        if not isinstance(ids, str):
            _check_ids(ids, limits)
    return tuple(item if isinstance(item, str) else tuple(item) for item in prompts)


def _check_ids(ids: list[int], limits: RequestLimits) -> None:
    highest = max(ids)
    if highest >= limits.vocab:
        raise InvalidRequest(
            f"`prompt` holds the token {highest}; token ids run from 0 to {limits.vocab - 1}",
            param="prompt",
        )
    if limits.media_pad in ids:
        raise InvalidRequest(
            f"`prompt` holds the token {limits.media_pad}, which stands for images; "
            "send images to /v1/chat/completions",
            param="prompt",
        )
