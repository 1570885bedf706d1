"""The spans of a request that ended, from the moments and parts that its account kept.

    POST /v1/...      router     opened by the door, below the client's span
      journey         router     one a prompt; its events are the first token and every stumble
        wait          router     for a reservation
        encode        encoder    prepare, encode_wait, tower
        prefill       prefill    prefill_wait, compute
        hand_off      decode     decode_wait, pull, verify
        decode        decode     the frames

Clocks of hosts differ, so rooms tell durations and the router places them within what it saw
itself: a span never leaves its parent. Knows times, counts and ids, never a request's words.
"""

from __future__ import annotations

from common.observe.otlp import Moment, Spans, Value
from router.recent import STAGES, Part, Past
from router.tracing import is_kept

SLACK_S = 1e-6  # of sums of floats


def tell(spans: Spans, past: Past) -> None:
    """Make the spans of a request; nothing where its trace is not kept."""
    if not is_kept(past.trace):
        return
    journey = spans.add(
        "router",
        "journey",
        past.trace,
        began=past.began,
        long_s=past.total_s,
        attributes=_of(past),
        error=past.outcome if past.is_failed else "",
        moments=_moments(past),
    )
    for part in past.parts:
        if part.within:
            continue
        above = spans.add(
            STAGES[part.name],
            part.name,
            journey,
            began=past.began + part.at_s,
            long_s=part.long_s,
            attributes=_where(part),
            error=part.error,
        )
        for inner in past.parts:
            if inner.within == part.name and _is_inside(inner, part):
                spans.add(
                    STAGES[part.name],
                    inner.name,
                    above,
                    began=past.began + inner.at_s,
                    long_s=inner.long_s,
                    attributes=_where(inner),
                )


def _of(past: Past) -> dict[str, Value]:
    said: dict[str, Value] = {
        "baton.request": past.request,
        "baton.outcome": past.outcome,
        "gen_ai.usage.input_tokens": past.prompt_tokens,
        "gen_ai.usage.output_tokens": past.completion_tokens,
    }
    return said | ({"baton.client_request": past.client} if past.client else {})


def _where(part: Part) -> dict[str, Value]:
    return {"baton.replica": part.replica} if part.replica else {}


def _moments(past: Past) -> list[Moment]:
    told = [
        Moment(
            name=stumble.name,
            at=past.began + stumble.at_s,
            attributes={
                "baton.room": stumble.room,
                "baton.replica": stumble.replica,
                "error.type": stumble.why,
            },
        )
        for stumble in past.stumbles
    ]
    if past.first_token_s is not None:
        at = past.began + past.first_token_s
        told.append(Moment(name="first_token", at=at, attributes={}))
    return sorted(told, key=lambda moment: moment.at)


def _is_inside(inner: Part, part: Part) -> bool:
    """Whether it lies in this one of several parts of that name."""
    ends = inner.at_s + inner.long_s <= part.at_s + part.long_s + SLACK_S
    return inner.at_s >= part.at_s - SLACK_S and ends
