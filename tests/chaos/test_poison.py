"""A value that is not finite ends one request with an error; its neighbours never notice.

Logits and the outputs of linear attention are looked at in every step, states when they are handed
over.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio

from common.errors import PoisonedState
from common.model.run import Run
from tests.chaos.test_endings import rooms
from tests.support.prompts import image, question
from tests.support.relay import Relay

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAN = float("nan")
ASK = {"max_tokens": 10, "temperature": 0.7, "seed": 9, "logprobs": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with rooms(encoder=1) as relay:
        yield relay


@pytest.fixture
def relay(running):
    yield running
    running.prefills[0].engine.plant = running.decodes[0].engine.plant = None


async def crowd(relay: Relay, victim: dict | None = None):
    """Four requests at once, the second one the victim: their replies, or what ended them."""
    lengths = [130, 65, 64, 200]
    tasks = [
        relay.task(question(n, n), **(ASK | (victim or {} if n == 65 else {}))) for n in lengths
    ]
    runs = [relay.run(task) for task in tasks]
    return tasks[1].request, await asyncio.gather(*runs, return_exceptions=True)


async def check(relay: Relay, whole, **victim) -> None:
    """The victim ends with the error, the others as ever, and all memory comes back."""
    _, got = await crowd(relay, victim)
    assert isinstance(got[1], PoisonedState)
    for at in (0, 2, 3):
        assert got[at].tokens == whole[at].tokens and got[at].finish == whole[at].finish
    await relay.nothing_left()
    for room in (relay.prefills[0], relay.decodes[0]):
        assert room.memory.slots.held == room.memory.pages.held == 0


def kda_layers(relay: Relay) -> int:
    return relay.decodes[0].memory.states.state.shape[1]


async def test_a_nan_in_a_running_state_ends_that_request_alone(relay):
    _, whole = await crowd(relay)
    for layer, choices in ((0, 1), (kda_layers(relay) - 1, 2)):

        def plant(batch, memory, layer=layer) -> None:
            for held, choice in batch:
                if held.reserve.prompt_tokens == 65 and len(choice.tokens) == 4:
                    memory.states.state[choice.slot, layer, layer % 2, 3, 5] = NAN

        relay.decodes[0].engine.plant = plant
        await check(relay, whole, n=choices)


async def test_a_nan_in_a_running_requests_page_ends_that_request_alone(relay):
    _, whole = await crowd(relay)

    def plant(batch, memory) -> None:
        for held, choice in batch:
            if held.reserve.prompt_tokens == 65 and len(choice.tokens) == 4:
                memory.latents.pages[choice.pages[0], 0, 7, 1] = NAN

    relay.decodes[0].engine.plant = plant
    await check(relay, whole)


def in_one(ops):
    """A step's linear attention as one op, made of the definitions."""

    def mix(raw, logits, strength, opening, parts, state, conv, layer, plan):
        q, k, v = ops.conv_steps(raw, parts.conv, conv, layer, plan).unbind(1)
        decay = ops.kda_gate(logits, parts.rate, parts.bias, parts.lower_bound)
        out = ops.kda_steps(q, k, v, decay, strength.float().sigmoid(), state, layer, plan)
        return ops.gated_rms_norm(out, opening, parts.norm, parts.eps)

    return mix


@pytest.mark.parametrize("value, fused", [(NAN, False), (float("inf"), False), (NAN, True)])
async def test_a_linear_attention_output_that_is_not_finite_is_found_though_no_logit_shows_it(
    relay, monkeypatch, value, fused
):
    model, spoilt = relay.decodes[0].loaded.model, []
    plain = model.ops
    if fused:
        monkeypatch.setattr(model, "ops", replace(plain, kda_mix=in_one(plain)))
    _, whole = await crowd(relay)

    def plant(batch, memory) -> None:
        spoilt[:] = [
            row
            for row, (held, choice) in enumerate(batch)
            if held.reserve.prompt_tokens == 65 and len(choice.tokens) == 4
        ]

    def norm(x, *more):
        out = plain.gated_rms_norm(x, *more)
        out[spoilt, 1, 5] = value
        return out

    def linear(x, *more):  # a body that swallows what is not a number, as fp8 ones do
        return plain.linear(x.nan_to_num(0.0, 0.0, 0.0) if spoilt else x, *more)

    relay.decodes[0].engine.plant = plant
    spoiling = replace(plain, gated_rms_norm=norm, linear=linear)
    one = in_one(spoiling) if fused else None
    monkeypatch.setattr(model, "ops", replace(spoiling, kda_mix=one))
    await check(relay, whole)
    monkeypatch.setattr(Run, "watch", lambda *_: None)
    _, got = await crowd(relay)
    assert all(reply.finish == ["length"] for reply in got), "the logits showed it after all"


@pytest.mark.parametrize("when", ["early", "late"])
async def test_a_nan_while_a_prompt_is_computed_ends_that_request_alone(relay, when):
    _, whole = await crowd(relay)

    def plant(chosen, memory) -> None:
        for work, _ in chosen:
            if work.total == 65 and work.done == 64:
                memory.states.state[work.slot, -1, 0, 0, 0] = NAN

    def plant_at_the_end(chosen, memory) -> None:
        for work, _ in chosen:
            if work.total == 65 and work.done == 64:
                memory.latents.pages[work.pages[0], -1, 3, 3] = NAN

    engine = relay.prefills[0].engine
    kept, engine._settings = engine._settings, changed_budget(engine._settings)
    try:
        engine.plant = plant if when == "early" else plant_at_the_end
        await check(relay, whole)
    finally:
        engine._settings = kept


def changed_budget(settings):
    return type(settings)(pages=settings.pages, step_tokens=64)


async def test_a_nan_in_a_state_is_found_at_the_hand_off_before_any_logit_shows_it(relay):
    prefill = relay.prefills[0]
    expect = prefill.memory.states.expect

    def planted(slot, nonce, tokens) -> None:
        expect(slot, nonce, tokens)
        prefill.memory.states.state[slot, 0, 0, 0, 0] = NAN

    prefill.memory.states.expect = planted
    try:
        with pytest.raises(PoisonedState, match="state:"):
            await relay.run(relay.task(question(1)))
    finally:
        del prefill.memory.states.expect
    await relay.nothing_left()


async def test_embeddings_that_are_not_finite_end_their_request_and_are_not_kept(relay):
    tower = relay.encoders[0].engine._tower
    forward = tower.forward
    tower.forward = lambda images: [rows * NAN for rows in forward(images)]
    task = {"images": [image()], "offsets": [40]}
    try:
        with pytest.raises(PoisonedState):
            await relay.run(relay.task(question(1), **task))
    finally:
        tower.forward = forward
    assert (await relay.run(relay.task(question(1), **task))).finish[0] in ("length", "stop")
    await relay.nothing_left()
