"""Rooms on a GPU whose steps are captured: what is found in them, and that two bodies agree.

The checkpoint is a tiny one of K3's kind with latents of 512 + 64 and heads of 128, so that every
body of an op can take it, FlashInfer's too where it is installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.config.settings import Settings
from common.errors import PoisonedState
from common.model.run import Run
from tests.support.golden import write_tiny
from tests.support.relay import Relay, Reply, changed, in_process

pytestmark = pytest.mark.gpu
NAN = float("nan")
LENGTHS = (130, 65, 64, 200)  # of the prompts
VICTIM = 1
SCRIPT = tuple(range(30, 54))
SHAPES = {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 8}
SMALL = {"slots": 16, "pages": 64}
MOST, MEAN = 0.6, 0.06  # nats between two bodies' log-probabilities, in bf16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    shapes = SHAPES | {"num_key_value_heads": SHAPES["num_attention_heads"]}
    return write_tiny(tmp_path_factory.mktemp("k3"), "k3-mxfp4", dtype="bfloat16", **shapes)


def rooms(checkpoint: Path, **model: object):
    model = {"path": str(checkpoint), "device": "cuda", "dtype": "bfloat16", **model}
    return in_process(changed(Settings(), model=model, prefill=SMALL, decode=SMALL))


async def crowd(relay: Relay) -> list[Reply | BaseException]:
    """Requests at once whose answers are given, so that only log-probabilities are computed."""
    prompts = [tuple(range(5 + n % 7, 5 + n % 7 + n)) for n in LENGTHS]
    asks = {"max_tokens": len(SCRIPT), "script": SCRIPT, "logprobs": 0}
    runs = [relay.run(relay.task(prompt, **asks)) for prompt in prompts]
    return await asyncio.gather(*runs, return_exceptions=True)


@pytest.fixture
def swallowing(monkeypatch) -> Iterator[None]:
    """A product that takes what is not a number for zero, as FP8 ones may."""
    from common.ops.rows import triton as products

    plain = products.linear
    monkeypatch.setattr(products, "linear", lambda x, *more: plain(x.nan_to_num(0, 0, 0), *more))
    yield


def plant(batch, memory) -> None:
    """Spoil a head's state in the first layer after the victim's fourth token."""
    for held, choice in batch:
        if held.reserve.prompt_tokens == LENGTHS[VICTIM] and len(choice.tokens) == 4:
            memory.states.state[choice.slot, 0, 1, 3, 5] = NAN


@pytest.mark.parametrize("watched", [True, False])
async def test_a_captured_step_finds_a_linear_attention_output_that_no_logit_shows(
    checkpoint, swallowing, monkeypatch, watched
):
    if not watched:
        monkeypatch.setattr(Run, "watch", lambda *_: None)
    async with rooms(checkpoint, exact=True) as relay:
        whole = await crowd(relay)
        relay.decodes[0].engine.plant = plant
        got = await crowd(relay)
        if not watched:  # the check itself: nothing else would have found it
            assert [reply.finish for reply in got] == [["length"]] * len(LENGTHS)
            return
        assert isinstance(got[VICTIM], PoisonedState)
        for at in set(range(len(LENGTHS))) - {VICTIM}:
            assert got[at].logprobs() == whole[at].logprobs(), LENGTHS[at]
        await relay.nothing_left()


async def test_rooms_with_the_fastest_bodies_say_what_our_own_say(checkpoint):
    """Prompts and captured steps, as FlashInfer computes them where it is installed."""
    told = {}
    for ops in ("triton", "auto"):
        async with rooms(checkpoint, ops=ops) as relay:
            told[ops] = [reply.logprobs() for reply in await crowd(relay)]
            again = [reply.logprobs() for reply in await crowd(relay)]
            bodies = relay.decodes[0].loaded.model.ops
            apart = differences(told[ops], again)
            print(f"{ops}: {bodies.mla_steps}; again it differs by {max(apart):.4f} nats")
            assert max(apart) < MOST
    if find_spec("flashinfer") is not None:
        assert type(bodies.mla_steps).__name__ == "FlashInferSteps"
    apart = differences(told["triton"], told["auto"])
    mean = sum(apart) / len(apart)
    print(f"{len(apart)} log-probabilities differ by {mean:.4f} nats, at most by {max(apart):.4f}")
    assert mean < MEAN and max(apart) < MOST


def differences(one: list[list[float]], other: list[list[float]]) -> list[float]:
    pairs = [
        pair
        for mine, theirs in zip(one, other, strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    assert len(pairs) == len(LENGTHS) * len(SCRIPT)
    return [abs(mine - theirs) for mine, theirs in pairs]
