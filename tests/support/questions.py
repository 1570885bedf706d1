"""Held-out questions on the level of tokens: ids, pictures and where they lie."""

from __future__ import annotations

import functools
import json
from typing import Any

from common.config.image_grid import ImageRules, image_grid
from common.contract.messages import ImageRef
from services.encoder.images import image_digest
from tests.support.golden import BUNDLED_EVAL
from tests.support.nano import nano_tokenizer
from tests.support.scenes import png


@functools.cache
def referenced() -> dict[str, dict[str, Any]]:
    """The cases whose prompt ids and greedy ids are on record, by id."""
    cases = [json.loads(line) for line in BUNDLED_EVAL.read_text().splitlines()]
    return {case["id"]: case for case in cases if case.get("reference")}


def pictures(case: dict[str, Any]) -> list[tuple[ImageRef, bytes]]:
    """A case's images as a job names them, with their bytes."""
    found = []
    for message in case["messages"]:
        parts = message["content"] if isinstance(message["content"], list) else []
        found += [_picture(part["recipe"]) for part in parts if part["type"] == "image"]
    return found


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """What `Relay.task` needs besides the prompt ids."""
    special = nano_tokenizer().specials
    images, offsets, at = pictures(case), [], 0
    for reference, _ in images:
        at = case["reference"]["prompt_ids"].index(special["<|media_pad|>"], at)
        offsets.append(at)
        at += reference.tokens
    return {
        "images": images,
        "offsets": offsets,
        "max_tokens": 160,
        "stop_ids": (special["<|end_of_msg|>"],),
    }


def _picture(recipe: dict[str, Any]) -> tuple[ImageRef, bytes]:
    payload = png(recipe)
    width, height = recipe["width"], recipe["height"]
    tokens = image_grid(width, height, ImageRules()).tokens
    reference = ImageRef(digest=image_digest(payload), width=width, height=height, tokens=tokens)
    return reference, payload
