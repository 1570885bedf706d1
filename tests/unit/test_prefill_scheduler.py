"""What a prefill step computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prefill.scheduler import Progress, plan_step


def totals(*values):
    return [Progress(done=0, total=value) for value in values]


@pytest.mark.parametrize("budget", [1, 7, 63, 64, 65])
def test_a_budget_below_one_chunk_is_one_chunk(budget):
    assert plan_step(totals(200), step_tokens=budget, max_batch=4) == [64]


def test_the_last_chunk_may_be_short():
    assert plan_step([Progress(done=128, total=130)], step_tokens=64, max_batch=4) == [2]


def test_short_prompts_do_not_wait_behind_a_long_one():
    assert plan_step(totals(10_000, 40, 100), step_tokens=256, max_batch=4) == [64, 40, 100]


def test_what_is_left_goes_to_the_oldest_when_it_is_alone():
    assert plan_step(totals(1000), step_tokens=512, max_batch=4) == [512]


def test_no_more_prompts_than_the_batch_allows():
    assert plan_step(totals(1, 1, 1), step_tokens=64, max_batch=2) == [1, 1, 0]


def test_nothing_waits_nothing_is_planned():
    assert plan_step([], step_tokens=64, max_batch=2) == []


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 700)), min_size=1, max_size=8),
    st.integers(1, 2048),
    st.integers(1, 8),
)
def test_every_plan_keeps_to_grid_and_budget_and_makes_progress(prompts, budget, batch):
    waiting = [Progress(done=64 * chunks, total=64 * chunks + left) for chunks, left in prompts]
    shares = plan_step(waiting, step_tokens=budget, max_batch=batch)
    assert shares[0] > 0
    assert sum(shares) <= max(budget, 64)
    assert sum(share > 0 for share in shares) <= batch
    for progress, share in zip(waiting, shares, strict=True):
        assert share % 64 == 0 or share == progress.left
        assert share <= progress.left
