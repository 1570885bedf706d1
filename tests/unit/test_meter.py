"""A room's figures for scaling, from made-up heartbeats."""

from __future__ import annotations

import pytest

from common.contract.messages import Load
from common.runtime.meter import Meter


def prefill(done, spent, queued=0):
    counters = {"baton_prefill_tokens_total": done, "baton_prefill_step_seconds_sum": spent}
    return Load(epoch=1, queued_tokens=queued, counters=counters)


def test_a_replica_that_keeps_up_is_offered_what_it_does():
    meter = Meter("prefill", 10.0)
    meter.take(0.0, prefill(0, 0.0))
    figures = meter.take(10.0, prefill(5000, 5.0))
    assert figures == pytest.approx({"busy": 0.5, "offered": 0.5, "backlog_s": 0.0, "held": 0.0})


def test_what_waits_counts_as_offered_and_as_backlog_at_the_measured_rate():
    meter = Meter("prefill", 10.0)
    meter.take(0.0, prefill(0, 0.0))
    figures = meter.take(10.0, prefill(10_000, 10.0, queued=20_000))
    assert figures["busy"] == 1.0
    assert figures["offered"] == pytest.approx(3.0)
    assert figures["backlog_s"] == pytest.approx(20.0)


def test_old_heartbeats_leave_the_window():
    meter = Meter("prefill", 5.0)
    for second in range(20):
        figures = meter.take(float(second), prefill(min(second, 10) * 100, min(second, 10) * 0.5))
    assert figures["busy"] == figures["offered"] == 0.0


def test_the_rate_is_kept_while_nothing_was_finished():
    meter = Meter("encoder", 5.0)
    done = {"baton_images_total": 10.0, "baton_encode_seconds_sum": 2.0}
    meter.take(0.0, Load(epoch=1))
    meter.take(1.0, Load(epoch=1, counters=done))
    for second in range(2, 9):
        figures = meter.take(float(second), Load(epoch=1, queued=20, counters=done))
    assert figures["backlog_s"] == pytest.approx(4.0)


def test_decode_tells_the_scarcer_of_slots_and_pages():
    load = Load(epoch=1, free_slots=8, total_slots=10, free_pages=25, total_pages=100)
    assert Meter("decode", 5.0).take(0.0, load)["held"] == pytest.approx(0.75)
