"""Requests that a group of ranks must answer as one rank does."""

from __future__ import annotations

import asyncio

from tests.support.walks import TOKENIZER, schema_form

PROMPTS = [tuple(range(20, 20 + n)) for n in (5, 64, 130)]
PENALTIES = {
    "repetition": 1.2,
    "presence": 0.4,
    "frequency": 0.3,
    "logit_bias": {40: 3.0, 41: -2.0},
    "min_tokens": 3,
    "stop_ids": (7, 9),
}
FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.01}
NOISE = {"temperature": 1.0, "seed": 5}
FORM = {"type": "array", "items": {"enum": ["rot", 12, None]}, "minItems": 2, "maxItems": 2}


async def answers(line) -> list:
    """Several requests at once: greedy, drawn, penalised, filtered, of several choices, with the
    best ids beside them, in a form, and one with a canary.
    """
    form = {"grammar": schema_form(FORM).grammar, "stop_ids": (TOKENIZER.end_of_msg,)}
    tasks = [line.task(p, max_tokens=8) for p in PROMPTS]
    tasks.append(line.task(PROMPTS[2], n=2, **NOISE, canary=True))
    tasks.append(line.task(PROMPTS[0], max_tokens=8, **NOISE, **PENALTIES, **FILTERS))
    tasks.append(line.task(PROMPTS[1], max_tokens=8, n=3, **NOISE, logprobs=5))
    tasks.append(line.task(PROMPTS[0], max_tokens=40, n=2, **NOISE, **form, logprobs=3))
    return list(await asyncio.gather(*map(line.run, tasks)))


def assert_alike(one, many, within: float) -> None:
    """The same tokens, and log-probabilities that are near; ids of the best may change places."""
    assert one.finish == many.finish
    for mine, theirs in zip(one.tokens, many.tokens, strict=True):
        assert [token.id for token in mine] == [token.id for token in theirs]
        for token, other in zip(mine, theirs, strict=True):
            assert abs(token.logprob - other.logprob) <= within
            assert len(token.top) == len(other.top)
            for (_, value), (_, found) in zip(token.top, other.top, strict=True):
                assert abs(value - found) <= within
