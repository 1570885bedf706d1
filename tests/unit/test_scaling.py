"""The scaling policy in a world of its own: steady, steps, bursts, days, losses, budgets."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.scaling import ScalingSettings
from common.errors import ConfigError
from services.scaling import STAGES, Memory, Report, Seen, bounds_of, decide
from tests.support.pools import world

CONFIG = ScalingSettings(enabled=True, up_s=5.0, down_s=60.0, start_s=120.0, retry_s=300.0)
SETTLING_S = 300.0


@pytest.mark.parametrize("load", [0.05, 0.4, 0.69, 0.71, 1.39, 1.41, 2.2, 2.7, 3.7, 5.5])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_constant_load_changes_nothing_after_settling(stage, load):
    run = world(CONFIG, **{stage: load}).run(SETTLING_S + 3600)
    assert run.changes(stage, since=SETTLING_S) == 0
    assert run.turns(stage) <= 1  # what had piled up by then is worked off by more, once
    replicas = run.targets(stage)[-1]
    assert load / replicas < CONFIG.high or replicas == bounds_of(CONFIG)[stage].most


@pytest.mark.parametrize(("start_s", "within_s"), [(5.0, 45.0), (20.0, 90.0), (60.0, 210.0)])
def test_a_step_is_met_within_a_few_starts(start_s, within_s):
    run = world(CONFIG, prefill=lambda now: 0.5 if now < 200 else 3.0)
    run.pools["prefill"].start_s = start_s
    run.run(1500)
    assert run.calm_after("prefill", 1.0, since=200) < within_s
    assert run.targets("prefill", since=1400)[-1] == math.ceil(3.0 / CONFIG.aim)


def test_a_step_of_decode_is_met_though_it_tells_no_backlog():
    run = world(CONFIG, decode=lambda now: 0.5 if now < 200 else 3.0).run(1500)
    assert run.calm_after("decode", 1.0, since=200) < 150
    assert run.targets("decode")[-1] <= 7


def test_when_load_falls_replicas_leave_once_and_not_below_need():
    run = world(CONFIG, prefill=lambda now: 3.0 if now < 600 else 0.9).run(1500)
    assert run.targets("prefill", since=1400)[-1] == 2
    assert run.turns("prefill") <= 1
    assert run.calm_after("prefill", 1.0, since=600) == 0.0


def test_bursts_shorter_than_the_patience_do_not_make_it_swing():
    run = world(CONFIG, prefill=lambda now: 1.6 if now % 120 < 4 else 0.5).run(3600)
    assert run.changes("prefill", since=SETTLING_S) == 0


def test_bursts_that_recur_before_down_s_keep_their_replicas():
    run = world(CONFIG, prefill=lambda now: 2.0 if now % 60 < 20 else 0.3).run(3600)
    assert run.changes("prefill", since=SETTLING_S) == 0
    assert run.targets("prefill")[-1] >= 3


def test_a_day_goes_up_once_and_down_once():
    def sun(now):
        return 2.2 - 1.9 * math.cos(2 * math.pi * now / 86_400)

    run = world(CONFIG, prefill=sun, decode=sun).run(86_400, dt=5.0)
    for stage in ("prefill", "decode"):
        assert run.turns(stage, since=3600) == 1
        assert run.changes(stage) <= 12
        assert run.calm_after(stage, 1.0, since=3600) == 0.0


def test_a_shift_of_the_mix_moves_devices_and_never_passes_the_budget():
    config = replace(CONFIG, budget=8)
    run = world(
        config,
        encoder=0.2,
        prefill=lambda now: 3.4 if now < 900 else 0.6,
        decode=lambda now: 0.6 if now < 900 else 3.4,
    ).run(2400)
    assert run.targets("prefill", since=800)[0] >= 5
    assert run.targets("decode", since=2300)[-1] >= 5
    assert run.calm_after("decode", 1.0, since=900) < 240
    assert run.most_devices() <= 8
    assert run.turns("decode") <= 1 and run.turns("prefill") <= 1


def test_a_stage_with_more_than_it_needs_gives_to_one_that_lacks_even_inside_its_dead_band():
    config = replace(CONFIG, budget=7, low=0.1)
    run = world(
        config,
        prefill=lambda now: 3.0 if now < 600 else 1.3,  # 1.3 on 5 is no reason to shrink by itself
        decode=lambda now: 0.6 if now < 600 else 2.0,
    ).run(1500)
    assert run.targets("prefill", since=500)[0] == 5
    assert run.targets("decode", since=1400)[-1] >= 3
    assert run.targets("prefill", since=1400)[-1] == 2
    assert run.most_devices() <= 7


def test_more_load_than_the_budget_can_serve_is_shared_and_still():
    config = replace(CONFIG, budget=6)
    run = world(config, prefill=5.0, decode=5.0).run(3600)
    assert run.most_devices() <= 6
    assert run.changes("prefill", since=SETTLING_S) == run.changes("decode", since=SETTLING_S) == 0
    assert min(run.targets("prefill")[-1], run.targets("decode")[-1]) >= 2
    assert "budget" in run.decisions["prefill"].reason


def test_replicas_that_never_start_are_given_up_and_tried_again_later():
    run = world(CONFIG, prefill=2.0)
    run.pools["prefill"].never_starts = True
    run.run(1800)
    told = run.targets("prefill")
    tries = sum(a == 1 < b for a, b in itertools.pairwise(told))
    assert 3 <= tries <= 5  # one every start_s + retry_s, not one every second
    held_s = sum(target > 1 for target in told)
    assert held_s <= tries * (CONFIG.start_s + 2)
    assert run.pools["prefill"].running == 1


def test_devices_of_replicas_that_never_started_go_to_others():
    config = replace(CONFIG, budget=6)
    run = world(config, prefill=3.0, decode=lambda now: 0.5 if now < 60 else 2.0)
    run.pools["prefill"].never_starts = True
    run.run(900)
    assert run.pools["decode"].running >= 3
    assert run.most_devices() <= 6


def test_slow_starts_do_not_make_it_ask_for_ever_more():
    run = world(CONFIG, prefill=lambda now: 0.5 if now < 100 else 2.0)
    run.pools["prefill"].start_s = 100.0
    run.run(2400)
    assert 3 <= run.targets("prefill", since=2300)[-1] <= 5
    assert run.turns("prefill") <= 1
    settled = replace(CONFIG, prefill_max=64)
    wide = world(settled, prefill=lambda now: 0.5 if now < 100 else 2.0)
    wide.pools["prefill"].start_s = 100.0
    wide.run(600)
    assert max(wide.targets("prefill")) <= 10  # not the 64 that it may have


def test_a_stage_without_any_figures_is_frozen():
    run = world(CONFIG, prefill=lambda now: 2.0 if now < 300 else 0.1)
    run.pools["prefill"].reporting = lambda now, running: running if now < 310 else 0
    run.run(1500)
    assert run.changes("prefill", since=320) == 0
    assert run.decisions["prefill"].is_frozen
    run.pools["prefill"].reporting = lambda now, running: running
    run.run(300)
    assert run.targets("prefill")[-1] == 1


def test_while_some_figures_are_missing_a_stage_may_grow_but_not_shrink():
    run = world(CONFIG, prefill=lambda now: 2.4 if now < 600 else 3.4)
    run.pools["prefill"].reporting = lambda now, running: running if now < 300 else running - 2
    run.run(590)
    before = run.targets("prefill", since=280)[0]
    assert min(run.targets("prefill", since=280)) >= before
    run.pools["prefill"].load = lambda now: 0.1
    run.run(600)
    assert run.targets("prefill")[-1] >= before
    assert "report" in run.decisions["prefill"].reason


def test_the_encoder_sleeps_without_images_and_wakes_for_one():
    config = replace(CONFIG, encoder_min=0)
    run = world(config, encoder=lambda now: 0.5 if now < 60 or now > 600 else 0.0).run(1200)
    assert 0 in run.targets("encoder", since=300)
    assert run.targets("encoder", since=610)[0] >= 1
    assert run.calm_after("encoder", 1.0, since=600) < run.pools["encoder"].start_s + 60
    assert run.turns("encoder") <= 1 + 1


reports = st.builds(
    Report,
    busy=st.floats(0, 1),
    offered=st.floats(0, 20),
    backlog_s=st.floats(0, 1000),
    held=st.floats(0, 1),
)


@st.composite
def stages(draw):
    running = draw(st.integers(0, 8))
    count = draw(st.integers(0, running))
    return Seen(
        running=running,
        target=draw(st.integers(0, 9)),
        reports=tuple(draw(st.lists(reports, min_size=count, max_size=count))),
        is_called=draw(st.booleans()),
    )


@given(st.fixed_dictionaries({s: stages() for s in STAGES}), st.integers(3, 20))
def test_whatever_is_seen_growth_stays_within_bounds_and_budget(seen, budget):
    config = replace(CONFIG, budget=budget, up_s=0.0, encoder_min=0, encoder_max=8)
    first, memory = decide(seen, {}, config, 100.0)
    assert decide(seen, {}, config, 100.0) == (first, memory)
    after = {s: max(d.target, seen[s].running) for s, d in first.items()}
    before = {s: max(seen[s].target, seen[s].running) for s in STAGES}
    for stage, bound in bounds_of(config).items():
        assert first[stage].target <= max(bound.most, seen[stage].running)
        assert first[stage].target >= min(bound.least, seen[stage].target)
    if sum(after.values()) > sum(before.values()):
        assert sum(after.values()) <= budget


def test_the_function_keeps_nothing_between_calls():
    seen = {"prefill": Seen(running=1, target=1, reports=(Report(busy=1.0, offered=2.0),))}
    _, memory = decide(seen, {}, CONFIG, 10.0)
    assert memory == {"prefill": Memory(above_since=10.0)}
    later, _ = decide(seen, memory, CONFIG, 15.0)
    assert later["prefill"].target == 3
    unaware, _ = decide(seen, {}, CONFIG, 15.0)
    assert unaware["prefill"].target == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prefill_min": 0}, "only the encoder may go down to 0"),
        ({"decode_min": 4, "decode_max": 3}, "decode_min is 4"),
        ({"low": 0.75}, "must rise"),
        ({"budget": 2}, "the least replicas need 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ScalingSettings(**values)
