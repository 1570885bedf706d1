"""Prompts of random ids, and one small picture, for tests that ask for tokens and not for sense."""

from __future__ import annotations

import functools
import random

from common.config.image_grid import ImageRules, image_grid
from common.contract.messages import ImageRef
from services.encoder.images import image_digest
from tests.support.scenes import png

SCENE = {
    "width": 56,
    "height": 28,
    "background": "white",
    "shapes": [{"shape": "circle", "color": "red", "x": 20, "y": 14, "r": 9}],
}


def question(seed: int, length: int = 150) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(5, 1200) for _ in range(length))


@functools.cache
def image() -> tuple[ImageRef, bytes]:
    """A picture of two rows."""
    payload = png(SCENE)
    width, height = SCENE["width"], SCENE["height"]
    tokens = image_grid(width, height, ImageRules()).tokens
    digest = image_digest(payload)
    return ImageRef(digest=digest, width=width, height=height, tokens=tokens), payload
