"""Replicas of several ranks on one GPU that they share, their steps from graphs."""

from __future__ import annotations

import pytest

from common.config.loading import parse_settings
from tests.support.asks import answers, assert_alike
from tests.support.relay import changed, in_process

pytestmark = pytest.mark.gpu
SMALL = {"slots": 8, "pages": 64, "max_batch": 4}
SETTINGS = parse_settings({"decode": SMALL, "prefill": SMALL}, source="test")


@pytest.mark.parametrize(
    "axes",
    [{"data": 2, "expert": 2}, {"tensor": 2}, {"tensor": 2, "data": 2, "expert": 4}],
    ids=str,
)
async def test_a_group_answers_by_graphs_as_one_rank_does(axes) -> None:
    model = {"device": "cuda", "dtype": "float32", "ops": "reference"}
    decode = axes | {"exchange": "direct"}
    async with in_process(changed(SETTINGS, model=model)) as line:
        alone = await answers(line)
    settings = changed(SETTINGS, model=model, decode=decode)
    async with in_process(settings, decode_ops="auto") as line:
        assert line.decodes[0].loaded.model.replays is not None
        group = await answers(line)
        await line.nothing_left()
    for one, many in zip(alone, group, strict=True):
        assert_alike(one, many, 1e-3)
