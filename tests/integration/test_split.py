"""Split = whole: encoder, prefill and decode give what one process gives, token for token.

"One process" is `tests/support/plain.py`: the whole prompt, then steps; no scheduler and no pool.
The request under test has the length of its scenario; its neighbours have other lengths.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import random
import shutil
from pathlib import Path

import pytest
import torch

from common.config.image_grid import ImageRules, image_grid
from common.config.settings import Settings
from common.contract.messages import ImageRef
from services.encoder.images import image_digest, prepare
from tests.support.golden import NANO, write_tiny
from tests.support.pairwise import pairwise
from tests.support.plain import greedy
from tests.support.relay import Relay, changed, in_process
from tests.support.scenes import png

FACTORS = {
    "length": [1, 3, 4, 63, 64, 65, 129, 1000],
    "budget": [1, 7, 64, 1024],
    "at_once": [1, 2, 3, 4, 5, 6, 7, 8],
    "images": [False, True],
    "replicas": [1, 2],
}
NEIGHBOURS = [5, 64, 2, 130, 63, 17, 66]
ANSWER = 6  # tokens
CLOSE = 1e-4  # logprobs, fp32
PICTURE = {
    "width": 56,
    "height": 28,
    "background": "white",
    "shapes": [{"shape": "circle", "color": "red", "x": 20, "y": 14, "r": 9}],
}


def is_run(row) -> bool:
    """A budget of one chunk a step for a thousand tokens is the budget 64 again."""
    return not (row["budget"] == 1 and row["length"] > 129)


@dataclasses.dataclass(frozen=True)
class Question:
    """Token ids, and where its picture's two rows lie (-1: no picture)."""

    ids: tuple[int, ...]
    image_at: int = -1


def question(length: int, with_image: bool, number: int, vocab: int) -> Question:
    rng = random.Random(f"{length} {with_image} {number}")
    ids = tuple(rng.randrange(5, vocab - 260) for _ in range(length))
    tokens = picture()[0].tokens
    fits = with_image and length > tokens
    return Question(ids, rng.randrange(length - tokens) if fits else -1)


@functools.cache
def picture() -> tuple[ImageRef, bytes]:
    payload = png(PICTURE)
    grid = image_grid(PICTURE["width"], PICTURE["height"], ImageRules())
    reference = ImageRef(
        digest=image_digest(payload),
        width=PICTURE["width"],
        height=PICTURE["height"],
        tokens=grid.tokens,
    )
    return reference, payload


class Whole:
    """Answers of the plain loop, each computed once."""

    def __init__(self, relay: Relay) -> None:
        loaded = relay.prefills[0].loaded
        self.spec, self.weights = loaded.spec, loaded.model.weights
        tower = relay.encoders[0].engine._tower
        reference, payload = picture()
        patches = prepare(payload, reference, ImageRules())
        pixels = torch.from_numpy(patches.pixels)
        self.rows = tower.forward([(pixels, (patches.grid.rows, patches.grid.columns))])[0]
        self.known: dict[Question, tuple[list[int], list[float]]] = {}

    def answer(self, asked: Question) -> tuple[list[int], list[float]]:
        if asked not in self.known:
            at = range(asked.image_at, asked.image_at + len(self.rows))
            embeds = (self.rows, tuple(at)) if asked.image_at >= 0 else (None, ())
            self.known[asked] = greedy(self.weights, self.spec, asked.ids, ANSWER, *embeds)
        return self.known[asked]


async def check(relay: Relay, whole: Whole, row) -> None:
    """Run one scenario and compare every request in it."""
    vocab = whole.spec.text.vocab
    lengths = [row["length"], *itertools.islice(itertools.cycle(NEIGHBOURS), row["at_once"] - 1)]
    asked = [question(n, row["images"], i, vocab) for i, n in enumerate(lengths)]
    use(relay, budget=row["budget"], replicas=row["replicas"])

    def task(one: Question):
        images = {"images": [picture()], "offsets": [one.image_at]} if one.image_at >= 0 else {}
        return relay.task(one.ids, max_tokens=ANSWER, canary=len(one.ids) % 2 == 1, **images)

    replies = await asyncio.gather(*[relay.run(task(one)) for one in asked])
    for one, reply in zip(asked, replies, strict=True):
        ids, logprobs = whole.answer(one)
        assert reply.ids() == ids, f"{len(one.ids)} tokens, {row}"
        worst = max(abs(a - b) for a, b in zip(reply.logprobs(), logprobs, strict=True))
        assert worst <= CLOSE, f"logprobs differ by {worst:.2g}: {len(one.ids)} tokens, {row}"


def use(relay: Relay, *, budget: int, replicas: int) -> None:
    """Set the step budget, and let requests go to so many replicas of each text room."""
    for room in relay.prefills:
        room.engine._settings = dataclasses.replace(room.engine._settings, step_tokens=budget)
    pairs = relay.house.pairs
    pairs._owed.clear()
    for i, prefill in enumerate(relay.house.seen("prefill")[0]):
        for j, decode in enumerate(relay.house.seen("decode")[0]):
            if max(i, j) < replicas:
                pairs.passed(prefill, decode)


@contextlib.asynccontextmanager
async def two_of_each(checkpoint: Path):
    settings = changed(Settings(), model={"path": str(checkpoint)})
    async with in_process(settings, encoder=2, prefill=2, decode=2) as relay:
        yield relay, Whole(relay)


async def test_every_pair_of_conditions_gives_the_answers_of_one_process():
    async with two_of_each(NANO) as (relay, whole):
        for row in pairwise(FACTORS, is_run):
            await check(relay, whole, row)
        await relay.nothing_left()


@pytest.mark.slow
async def test_every_combination_of_conditions_gives_the_answers_of_one_process(tmp_path):
    shallow = write_tiny(
        tmp_path / "shallow",
        "k3-mxfp4",
        num_hidden_layers=2,
        linear_attn_config={
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": [2],
            "kda_layers": [1],
        },
    )
    shutil.copy(NANO / "preprocessor_config.json", shallow)
    async with two_of_each(shallow) as (relay, whole):
        for values in itertools.product(*FACTORS.values()):
            row = dict(zip(FACTORS, values, strict=True))
            if is_run(row):
                await check(relay, whole, row)
        await relay.nothing_left()
