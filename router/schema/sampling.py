"""The fields that steer sampling, shared by every endpoint, and what a room is told of them.

Ranges stand in the types, where both the checks and the OpenAPI page read them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from common.contract.messages import Sampling
from common.errors import ContextLengthExceeded, InvalidRequest, NotFound
from router.schema.limits import RequestLimits

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # the lower, the earlier
Choices = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
Share = Annotated[float, Meta(ge=0, le=1)]

REFUSED: Mapping[str, str] = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "audio": "only text is produced",
    "web_search_options": "this server does not search the web",
    "prediction": "predicted outputs are not offered",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "use `structured_outputs`",
    ),
    "allowed_token_ids": "use `structured_outputs`, or `logit_bias`",
    "bad_words": "use `logit_bias`",
    "prompt_logprobs": "the prompt's logprobs are not computed",
    "use_beam_search": "answers are sampled; ask for `n` choices and pick one",
    "continue_final_message": "an answer cannot be begun for the model",
}


class SamplingBody(msgspec.Struct, kw_only=True):
    """Fields every endpoint that samples has; null means unset."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1: off
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Choices | None = None  # the upper bound is a setting
    best_of: Choices | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    priority: Priority | None = None
    user: str | None = None


class ScriptFields(msgspec.Struct, kw_only=True):
    """The test hook's fields, read only where the settings allow it."""

    baton_script: str | None = None
    baton_script_ids: list[Id] | None = None
    baton_script_ends: str | None = (
        None  # "message" (default): end_of_msg follows; "length": nothing does
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Tokens a test puts in place of sampled ones: a text (markers count) or ids."""

    text: str = ""
    ids: tuple[int, ...] = ()
    ends_message: bool = True


class Sampled(Protocol):
    """What `fit_sampling` needs of a request."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def max_tokens(self) -> int | None: ...


def fit_sampling(
    request: Sampled, prompt_tokens: int, limits: RequestLimits, param: str = "messages"
) -> Sampling:
    """The request's sampling with `max_tokens` settled: as asked, or what the context leaves.

    Raises:
        ContextLengthExceeded: the prompt leaves no room for a single token.
    """
    room = limits.context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; with one token of answer it must fit the "
            f"model's context of {limits.context} tokens. Shorten it",
            param=param,
        )
    asked = request.max_tokens or limits.default_max_tokens or room
    settled = min(asked, room)
    least = min(request.sampling.min_tokens, settled)
    return msgspec.structs.replace(request.sampling, max_tokens=settled, min_tokens=least)


def to_sampling(
    body: SamplingBody, limits: RequestLimits, logprobs: int | None, max_tokens: int | None
) -> Sampling:
    """Check what the types cannot say, and translate; `max_tokens` is what the body came to.

    That of the result stays 1 until `fit_sampling`.
    """
    if body.n is not None and not 1 <= body.n <= limits.max_choices:
        raise InvalidRequest(
            f"`n` is {body.n}; it must be an integer from 1 to {limits.max_choices}", param="n"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            "`best_of` is not offered: ask for `n` choices and pick one", param="best_of"
        )
    if body.min_tokens and max_tokens and body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` is {body.min_tokens}, above the limit of {max_tokens} tokens",
            param="min_tokens",
        )
    top_k = max(0, body.top_k or 0)
    if body.top_p == 0:  # an empty share still holds the best token
        top_k = 1
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        repetition=body.repetition_penalty or 1.0,
        logit_bias=_biases(body.logit_bias or {}, limits.vocab),
        n=body.n or 1,
        min_tokens=body.min_tokens or 0,
        stop_ids=_stop_ids(body, limits),
        logprobs=logprobs,
    )


def _biases(biases: Mapping[str, float], vocab: int) -> dict[int, float]:
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(
            f"`logit_bias` has {len(biases)} entries; at most {MAX_BIASES} are allowed",
            param="logit_bias",
        )
    checked = {}
    for name, bias in biases.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", name) or int(name) >= vocab:
            raise InvalidRequest(
                f"`logit_bias` names the token {name[:40]!r}; token ids run from 0 to {vocab - 1}",
                param="logit_bias",
            )
        checked[int(name)] = bias
    return checked


def _stop_ids(body: SamplingBody, limits: RequestLimits) -> tuple[int, ...]:
    for token in body.stop_token_ids or ():
        if token >= limits.vocab:
            raise InvalidRequest(
                f"`stop_token_ids` holds {token}; token ids run from 0 to {limits.vocab - 1}",
                param="stop_token_ids",
            )
    own = () if body.ignore_eos else (limits.eos,)
    stops = tuple(dict.fromkeys((*own, *(body.stop_token_ids or ()))))
    if body.min_tokens and len(stops) >= limits.vocab:
        raise InvalidRequest(
            "`min_tokens` asks for tokens before the first stop, and `stop_token_ids` names every "
            "token there is; leave some out",
            param="stop_token_ids",
        )
    return stops


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The request's stop strings.

    Raises:
        InvalidRequest: too many, too long, or empty.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(
            f"`stop` has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop"
        )
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"`stop` holds a string of {len(text)} characters; 1 to {MAX_STOP_LENGTH} are fine",
                param="stop",
            )
    return stops


def includes_usage(body: SamplingBody) -> bool:
    """Whether the stream ends with a usage chunk.

    Raises:
        InvalidRequest: `stream_options` says something although nothing is streamed.
    """
    options = body.stream_options or {}
    wanted = options.get("include_usage")
    if options and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream: true`", param="stream_options")
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequest(
            "`stream_options.include_usage` must be a boolean", param="stream_options.include_usage"
        )
    return bool(wanted)


def check_model(name: str, limits: RequestLimits) -> None:
    """Refuse a model that is not served.

    Raises:
        NotFound: `name` is none of the served names.
    """
    if name not in limits.models:
        served = ", ".join(f"`{model}`" for model in sorted(limits.models))
        raise NotFound(
            f"the model `{name[:100]}` is not served here; served: {served}", param="model"
        )


def check_refused(raw: Mapping[str, Any]) -> None:
    """Refuse fields that cannot be passed over without changing the answer's meaning."""
    for name, remedy in REFUSED.items():
        if raw.get(name):
            raise InvalidRequest(f"`{name}` is not supported: {remedy}", param=name)
    modalities = raw.get("modalities")
    if modalities not in (None, ["text"]):
        raise InvalidRequest(
            '`modalities` must be ["text"]: only text is produced', param="modalities"
        )


def to_script(fields: ScriptFields, vocab: int) -> Script | None:
    """The test hook's request, if the body carries one."""
    if fields.baton_script is None and fields.baton_script_ids is None:
        return None
    if any(token >= vocab for token in fields.baton_script_ids or ()):
        raise InvalidRequest(f"token ids run from 0 to {vocab - 1}", param="baton_script_ids")
    return Script(
        text=fields.baton_script or "",
        ids=tuple(fields.baton_script_ids or ()),
        ends_message=fields.baton_script_ends != "length",
    )


def ignored_header(names: Sequence[str]) -> str:
    """Value of the `X-Baton-Ignored` header: names that fit it, and how many others there were."""
    plain = [name for name in names if re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", name)][:20]
    rest = len(names) - len(plain)
    return ", ".join(plain + ([f"and {rest} more"] if rest else []))
