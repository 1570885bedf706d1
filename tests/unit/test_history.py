"""A choice's history: every id whose logit changes, once, however it came there."""

import numpy as np
import pytest

from common.contract.messages import Sampling
from common.ops.draw import COUNT_SHIFT, HAS_BIAS, IS_SEEN, IS_STOP
from common.sampling.history import MOST_IDS, History


def listed(history: History) -> dict[int, tuple[int, int, float]]:
    """By id: the bits, how often, and the bias."""
    rows = history.spacious[: history.size]
    assert not history.spacious[history.size :].any()
    found = {
        id: (what & (1 << COUNT_SHIFT) - 1, what >> COUNT_SHIFT, float(np.int32(bias).view("f4")))
        for id, what, bias in rows.tolist()
    }
    assert len(found) == history.size
    return found


def test_every_reason_to_change_a_logit_is_in_the_list() -> None:
    sampling = Sampling(repetition=1.5, logit_bias={3: 2.5, 8: -1.0}, min_tokens=2, stop_ids=(8, 9))
    history = History(sampling, prompt=(3, 4), tokens=(4, 4, 5))
    assert listed(history) == {
        3: (HAS_BIAS | IS_SEEN, 0, 2.5),
        4: (IS_SEEN, 2, 0.0),
        5: (0, 1, 0.0),
        8: (HAS_BIAS | IS_STOP, 0, -1.0),
        9: (IS_STOP, 0, 0.0),
    }


def test_ids_that_no_vocabulary_has_are_left_out() -> None:
    assert listed(History(Sampling(logit_bias={-1: 1.0, MOST_IDS: 1.0, 7: 1.0}))).keys() == {7}


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_list_that_grew_is_the_list_made_anew(asked_before: bool) -> None:
    sampling = Sampling(frequency=0.5, logit_bias={2: 1.0})
    history, tokens = History(sampling, tokens=(1,)), [1]
    if asked_before:
        assert history.size == 2
    for token in [2, 1, *range(100), 5, 5]:
        history.take(token)
        tokens.append(token)
    assert history.counts == History(sampling, tokens=tokens).counts
    assert listed(history) == listed(History(sampling, tokens=tokens))


def test_a_device_is_told_which_places_changed_until_the_list_moves() -> None:
    history = History(Sampling(presence=0.5), tokens=(7, 8))
    history.kept, places = "copy", len(history.spacious)
    history.take(8)
    history.take(9)
    assert history.late == [1, 2] and history.kept == "copy"
    for token in range(100, 100 + places):
        history.take(token)
    assert len(history.spacious) == 2 * places and history.kept is None


def test_without_penalties_tokens_are_counted_and_no_list_grows() -> None:
    history = History(Sampling(logit_bias={1: 1.0}), prompt=(5,), tokens=(1,))
    assert history.size == 1
    history.take(6)
    assert history.counts == {1: 1, 6: 1} and not history.late and history.size == 1
    assert not history.prompt
