"""A wrong computation, well signed: found by a share of requests, taken out, and kept out."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from common.weights.tree import KdaWeights
from router.readiness import Readiness
from tests.chaos.test_endings import rooms, until
from tests.support.prompts import question
from tests.support.relay import Relay

ASK = {"max_tokens": 8}
EVERY = 3  # one request in three has the canary


@contextlib.contextmanager
def gate_of_one_head_off(room, what: str):
    """One head of one layer's gate computes as if its weights were zero."""
    layer = next(w for w in room.loaded.model.weights.layers if isinstance(w.mixer, KdaWeights))
    spec, head = room.loaded.spec.text.kda, 1
    if what == "decay gate":
        weight = layer.mixer.f_b.view(spec.num_heads, spec.head_dim, -1)[head]
    elif layer.mixer.g_b is not None:
        weight = layer.mixer.g_b.view(spec.num_heads, spec.head_dim, -1)[head]
    else:
        at = 3 * spec.inner + head * spec.head_dim
        weight = layer.mixer.inputs[at : at + spec.head_dim]
    kept = weight.clone()
    weight.zero_()
    try:
        yield
    finally:
        weight.copy_(kept)


def pairs_of(relay: Relay, room) -> list[bool]:
    """Whether this prefill replica may serve, with each decode replica."""
    prefills, decodes = relay.house.seen("prefill")[0], relay.house.seen("decode")[0]
    mine = next(c for c in prefills if c.id == room.room.id)
    return [relay.house.pairs.usable(mine, decode) for decode in decodes]


@pytest.mark.parametrize(
    "what", ["output gate", pytest.param("decay gate", marks=pytest.mark.slow)]
)
async def test_a_wrong_gate_in_one_prefill_replica_is_found_and_its_pairs_taken_out(what):
    async with rooms(prefill=2, decode=2) as relay:
        seeds = range(6)
        whole = [await answer(relay, seed) for seed in seeds]
        first, second = sorted(relay.prefills, key=lambda room: room.room.id)
        with gate_of_one_head_off(first, what):
            asked = 0
            while any(pairs_of(relay, first)):  # idle replicas: the lower id is always the first
                assert asked < 40, "the canary has not seen it"
                await asyncio.gather(
                    *[answer(relay, seed, canary=seed % EVERY == 0) for seed in seeds]
                )
                asked += len(seeds)
            assert all(pairs_of(relay, second))
            again = await asyncio.gather(*[answer(relay, seed) for seed in seeds])
            assert list(again) == whole
            readiness = Readiness(relay.house, context=512)
            probing = asyncio.create_task(readiness.run())
            await asyncio.sleep(1.5)  # probes are canaries too: they do not let it back
            assert not any(pairs_of(relay, first)) and all(pairs_of(relay, second))
        await until(lambda: all(pairs_of(relay, first)), within_s=15.0)  # it is whole again
        probing.cancel()
        await relay.nothing_left()


async def answer(relay: Relay, seed: int, canary: bool = False) -> list[int]:
    return (await relay.run(relay.task(question(seed), canary=canary, **ASK))).ids()
