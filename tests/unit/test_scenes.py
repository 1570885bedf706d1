from __future__ import annotations

import io
import json

import numpy as np
from PIL import Image

from tests.support.golden import NANO_EVAL
from tests.support.scenes import fingerprint, pixels, png


def test_every_held_out_picture_has_the_pixels_it_was_recorded_with():
    seen = 0
    for line in NANO_EVAL.read_text().splitlines():
        case = json.loads(line)
        parts = [
            p for m in case["messages"] if isinstance(m.get("content"), list) for p in m["content"]
        ]
        recipes = [part["recipe"] for part in parts if part["type"] == "image"]
        assert [fingerprint(recipe) for recipe in recipes] == case["image_sha256"]
        seen += len(recipes)
        for recipe in recipes[:1]:
            with Image.open(io.BytesIO(png(recipe))) as image:
                np.testing.assert_array_equal(np.asarray(image), pixels(recipe))
    assert seen > 0
