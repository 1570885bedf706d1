"""A decode step: masks are begun before its pass, and a choice goes on by the token it got."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from common.config.settings import DecodeSettings
from common.contract.messages import Sampling
from common.observe.metrics import Tally
from common.runtime.choosing import Near
from common.sampling.history import History
from services.decode.engine import DecodeEngine
from services.decode.held import Choice


def running(sampling: Sampling, tokens: list[int], matcher=None):
    """A request of one choice, whose tokens but the last were fed."""
    choice = Choice(
        index=0,
        slot=0,
        pages=(0,),
        tokens=tokens,
        history=History(sampling, tokens=tokens),
        matcher=matcher,
    )
    held = SimpleNamespace(
        is_paused=False,
        id=b"",
        memory=MagicMock(lane=0),
        job=SimpleNamespace(sampling=sampling, request="r"),
        reserve=SimpleNamespace(prompt_tokens=64, request="r"),
        choices=[choice],
        caller="c",
    )
    return held, choice


def test_masks_begin_before_the_pass_and_only_of_choices_that_get_a_token() -> None:
    told: list[object] = []
    first = Sampling(temperature=0, max_tokens=9, presence=5.0)
    matchers = [MagicMock(), MagicMock()]
    pairs = [
        running(first, [3], matchers[0]),
        running(first, [3, 4]),  # a replay, one token behind
        running(Sampling(script=(1, 2), max_tokens=9), [1], matchers[1]),
    ]

    def begin(positions):
        told.append(positions)
        return SimpleNamespace(result=lambda: told.append("waited") or [b"\x28", None])

    def forward(batch, memory):
        told.append([share.want_logits for share in batch.shares])
        return torch.tensor([[0.0, 0, 0, 2.0, 0, 1.0, 0, 9.0]] * 2)

    model = Near(SimpleNamespace(forward=forward))
    engine = DecodeEngine(
        model, MagicMock(), MagicMock(), MagicMock(), DecodeSettings(), Tally(),
        epoch=1, lease_s=1.0, canary_bound=0.0, push=MagicMock(), release=MagicMock(),
        masks=SimpleNamespace(begin=begin), pull_threads=MagicMock(),
    )  # fmt: skip
    engine._running = list(pairs)
    assert engine._step()
    assert told == [[matchers[0], None], [True, False, True], "waited"]
    assert [choice.tokens for _, choice in pairs] == [[3, 5], [3, 4], [1, 2]]
    assert [choice.history.counts for _, choice in pairs] == [
        {3: 1, 5: 1},
        {3: 1, 4: 1},
        {1: 1, 2: 1},
    ]
    matchers[0].take.assert_called_once_with(5)
    matchers[1].take.assert_called_once_with(2)  # a script does not hold a grammar up
