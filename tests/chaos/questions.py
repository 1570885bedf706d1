"""What the soak asks, and the answers one plain process gives: drawn from a seed, computed once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config.image_grid import ImageRules, image_grid
from common.config.settings import Settings
from common.contract.messages import ImageRef, Sampling
from common.runtime.loaded import load_facts
from common.sampling.sampler import Row, sample
from common.weights import load_text, load_vision
from services.encoder.images import image_digest, prepare
from services.encoder.moonvit import MoonVit
from tests.support.plain import Plain
from tests.support.relay import changed
from tests.support.scenes import png

SCENE = {
    "width": 56,
    "height": 28,
    "background": "white",
    "shapes": [{"shape": "circle", "color": "red", "x": 20, "y": 14, "r": 9}],
}
LOWEST, HIGHEST = 5, 1200  # ids of ordinary tokens


@dataclass(frozen=True)
class Question:
    """Token ids, how to sample, and the row of its picture (-1: none)."""

    ids: tuple[int, ...]
    sampling: Sampling
    image_at: int
    canary: bool
    answers: tuple[tuple[int, ...], ...]  # of each choice


def picture() -> tuple[ImageRef, bytes]:
    payload = png(SCENE)
    grid = image_grid(SCENE["width"], SCENE["height"], ImageRules())
    reference = ImageRef(
        digest=image_digest(payload),
        width=SCENE["width"],
        height=SCENE["height"],
        tokens=grid.tokens,
    )
    return reference, payload


class Author:
    """Makes questions and knows their answers; holds the model once."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        facts = load_facts(changed(Settings(), model={"path": str(checkpoint)}))
        self._spec, self._random = facts.spec, random.Random(seed)
        text = {"dtype": facts.dtype, "device": facts.device}
        self._weights = load_text(facts.directory, facts.spec, **text)
        tower = MoonVit(facts.spec.vision, load_vision(facts.directory, facts.spec, **text))
        reference, payload = picture()
        patches = prepare(payload, reference, ImageRules())
        grid = (patches.grid.rows, patches.grid.columns)
        self._rows = tower.forward([(torch.from_numpy(patches.pixels), grid)])[0]

    def question(self) -> Question:
        draw = self._random
        length = draw.choice([3, 17, 63, 64, 65, 100, 129, 200])
        image_at = draw.randrange(length - 2) if length > 8 and draw.random() < 0.3 else -1
        sampling = Sampling(
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(1 << 32),
            max_tokens=draw.choice([1, 2, 8, 24]),
            n=draw.choice([1, 1, 2]),
        )
        ids = tuple(draw.randrange(LOWEST, HIGHEST) for _ in range(length))
        answers = tuple(self._answer(ids, sampling, c, image_at) for c in range(sampling.n))
        return Question(ids, sampling, image_at, draw.random() < 0.3, answers)

    def _answer(self, ids, sampling: Sampling, choice: int, image_at: int) -> tuple[int, ...]:
        model = Plain(self._weights, self._spec.text)
        at = range(image_at, image_at + len(self._rows)) if image_at >= 0 else ()
        logits, tokens = model.feed(ids, self._rows if at else None, tuple(at))[-1], []
        while True:
            row = Row(sampling=sampling, choice=choice, position=len(tokens))
            tokens.append(sample(logits[None], [row])[0].id)
            if len(tokens) == sampling.max_tokens:
                return tuple(tokens)
            logits = model.feed(tokens[-1:])[-1]
