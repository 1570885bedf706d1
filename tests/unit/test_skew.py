"""The skew of experts: what is counted on the device, and what is told of it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from common.model.load import ExpertLoad
from common.observe.metrics import Tally
from common.runtime.graphs import GraphedModel
from common.runtime.recorder import Eager
from services.decode.skew import EVERY_S, LEAST, Skew, skew
from tests.support.golden import NANO
from tests.support.models import Loaded, Request, allocate, chunks, load, steps


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(NANO)


def test_rows_are_counted_by_layer_and_padding_is_not(loaded) -> None:
    counted = ExpertLoad(loaded.spec.text, torch.device("cpu"))
    layers = len(counted.counts)
    chosen = [torch.tensor([[0, 1], [0, layer + 2], [1, 3]]) for layer in range(layers)]
    counted.count(chosen, torch.tensor([True, True, False]))
    counted.count(chosen, torch.tensor([False, True, False]))
    for layer, rows in enumerate(counted.counts.tolist()):
        wanted = {0: 3, 1: 1, layer + 2: 2}
        assert {expert: n for expert, n in enumerate(rows) if n} == wanted


def test_steps_count_each_token_once_whatever_pads_them_and_prompts_do_not_count() -> None:
    """Whole tiles, a graph's bucket, and a row alone: the same choices, the same counts."""
    counts = []
    for graphed in (False, True):
        loaded = load(NANO)
        memory = allocate(loaded.spec.text, slots=4, pages=4)
        model = loaded.model
        if graphed:
            model = GraphedModel(model, memory, most=4, width=2, recorder=Eager())
        requests = [Request(slot, (slot,)) for slot in range(3)]
        for request in requests:
            model.forward(chunks(request.share([5, 6, 7])), memory)
        assert not any(map(sum, loaded.model.load()))
        for token in (9, 10):
            model.forward(steps(*(r.share([token + r.slot]) for r in requests)), memory)
        counts.append(loaded.model.load())
    top_k, layers = loaded.spec.text.moe.top_k, len(loaded.spec.text.moe_layers)
    assert counts[0] == counts[1]
    assert [sum(rows) for rows in counts[0]] == [6 * top_k] * layers


def test_the_skew_is_the_worst_layers_busiest_expert_over_the_mean() -> None:
    zero = [[0, 0], [0, 0]]
    even, odd = [LEAST, LEAST], [3 * LEAST, LEAST]
    assert skew(zero, [even, even]) == 1.0
    assert skew(zero, [even, odd]) == 1.5
    assert skew([odd, odd], [[4 * LEAST, 2 * LEAST], [4 * LEAST, 4 * LEAST]]) == 1.5
    assert skew(zero, [even, [LEAST, LEAST - 2]]) is None  # too few rows to say
    assert skew([], []) is None  # a model without experts


def test_a_window_grows_until_it_has_rows_enough() -> None:
    tally, counts, asked = Tally(), [[0, 0]], []

    def ask(read) -> Future:
        asked.append(True)
        future: Future = Future()
        future.set_result([list(row) for row in read()])
        return future

    one = Skew(lambda: counts, ask, tally)
    one.look(100.0)
    counts[0][0] += LEAST
    one.look(100.0 + EVERY_S / 2)  # too early
    assert len(asked) == 1
    one.look(100.0 + EVERY_S)
    assert tally.snapshot() == {}
    counts[0][0] += LEAST
    one.look(100.0 + 2 * EVERY_S)
    assert tally.snapshot() == {"baton_expert_skew": 2.0}


def test_an_engine_that_is_over_is_no_fault_here() -> None:
    def ask(_) -> Future:
        future: Future = Future()
        future.set_exception(RuntimeError("over"))
        return future

    tally = Tally()
    Skew(lambda: [], ask, tally).look(1.0)
    assert tally.snapshot() == {}
