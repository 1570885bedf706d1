"""The bundled checkpoint's own record: reply ids and best log-probabilities of held-out cases."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from common.config.checkpoint import load_spec
from common.config.image_grid import image_grid, load_image_rules
from common.contract.messages import ImageRef
from common.weights import load_vision
from services.encoder.images import image_digest, prepare
from services.encoder.moonvit import MoonVit
from tests.support import scenes
from tests.support.golden import NANO, NANO_EVAL
from tests.support.models import Loaded, Request, allocate, chunks, pages_for, steps


def cases() -> list[dict]:
    return [
        case
        for case in map(json.loads, NANO_EVAL.read_text().splitlines())
        if case.get("reference")
    ]


@functools.cache
def tower() -> MoonVit:
    spec = load_spec(NANO)
    assert spec.vision is not None
    return MoonVit(spec.vision, load_vision(NANO, spec, dtype=torch.float32))


def embeddings(case: dict) -> torch.Tensor | None:
    """Rows for all of a case's pictures, in order."""
    parts = [
        part
        for message in case["messages"]
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    if not parts:
        return None
    images, rules = [], load_image_rules(NANO)
    for part, digest in zip(parts, case["image_sha256"], strict=True):
        assert scenes.fingerprint(part["recipe"]) == digest
        payload = scenes.png(part["recipe"])
        width, height = part["recipe"]["width"], part["recipe"]["height"]
        tokens = image_grid(width, height, rules).tokens
        ref = ImageRef(digest=image_digest(payload), width=width, height=height, tokens=tokens)
        patches = prepare(payload, ref, rules)
        images.append((torch.from_numpy(patches.pixels), (patches.grid.rows, patches.grid.columns)))
    return torch.cat(tower().forward(images))


def logprobs_of(loaded: Loaded, case: dict) -> torch.Tensor:
    """Log-probabilities after the prompt and after each recorded token but the last."""
    prompt, reply = case["reference"]["prompt_ids"], case["reference"]["ids"]
    embeds = embeddings(case)
    pads = tuple(i for i, t in enumerate(prompt) if t == loaded.spec.media_pad)
    total = pages_for(len(prompt) + len(reply))
    memory = allocate(loaded.spec.text, slots=1, pages=total, dtype=loaded.dtype)
    request = Request(0, tuple(range(total)))
    first = request.share(prompt, embeds=embeds, embed_at=pads)
    logits = [loaded.model.forward(chunks(first), memory)]
    logits += [loaded.model.forward(steps(request.share([t])), memory) for t in reply[:-1]]
    return torch.cat(logits).log_softmax(-1)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_ids_and_best_logprobs_are_those_of_the_record(tiny, case) -> None:
    logprobs = logprobs_of(tiny("nano"), case)
    assert logprobs.argmax(-1).tolist() == case["reference"]["ids"]
    for row, best in zip(logprobs, case["reference"]["top5"], strict=False):
        ids, values = zip(*best, strict=True)
        torch.testing.assert_close(row[list(ids)], torch.tensor(values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", cases()[5:15], ids=lambda case: case["id"])
def test_bfloat16_gives_the_recorded_ids_with_logprobs_near(tiny, case) -> None:
    logprobs = logprobs_of(tiny("nano", torch.bfloat16), case)
    if case["margin"] > 0.5:
        assert logprobs.argmax(-1).tolist() == case["reference"]["ids"]
    for row, best in zip(logprobs, case["reference"]["top5"], strict=False):
        ids, values = zip(*best, strict=True)
        torch.testing.assert_close(row[list(ids)], torch.tensor(values), rtol=0, atol=0.6)
        assert abs(row[ids[0]] - values[0]) < 0.1
