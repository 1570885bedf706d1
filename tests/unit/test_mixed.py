"""The mixed load's arithmetic by hand; both ways answer the same tokens and leave nothing."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.mixed import Line, Side, parsed, settings_of
from benchmarks.mixed_figures import (
    Answered,
    Asked,
    Objective,
    equal,
    figures,
    load,
    percentile,
    table,
)
from benchmarks.mixed_rooms import made_rooms, set_chunk
from benchmarks.step import Weighed
from common.runtime.loaded import load_text
from common.runtime.recorder import Eager
from router.seats import Seat
from tests.support.relay import house_of

GOAL = Objective(first_s=2.0, each_s=0.04)


def answer(*times: float, wanted: int = 3) -> Answered:
    return Answered(prompt=100, wanted=wanted, ids=list(range(len(times))), times=list(times))


@pytest.mark.parametrize(
    ("share", "found"), [(0.5, 2.0), (0.75, 3.0), (0.76, 4.0), (0.99, 4.0), (0.01, 1.0)]
)
def test_a_percentile_is_the_nearest_rank(share, found) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == found


def test_an_answer_is_good_when_both_of_its_times_are() -> None:
    assert answer(2.0, 2.03, 2.07).meets(GOAL)
    assert not answer(2.1, 2.11, 2.12).meets(GOAL)
    assert not answer(1.0, 1.01, 1.1).meets(GOAL)  # 50 ms a token
    assert not answer(1.0, 1.01).meets(GOAL)  # one never came
    assert answer(1.0, wanted=1).meets(GOAL)


def test_what_never_came_is_infinitely_late_and_no_good() -> None:
    found = figures([answer(1.0, 1.02, 1.06), answer(0.5), answer()], 2.0, GOAL)
    assert found == {
        "requests": 3,
        "whole": 1,
        "good": 1,
        "goodput": 0.5,
        "prompt_tokens": 300,
        "first_s_p50": 1.0,
        "first_s_p99": None,
        "each_s_p50": None,
        "each_s_p99": None,
        "gap_s_p50": 0.02,
        "gap_s_p99": 0.04,
        "gap_s_max": 0.04,
    }


def test_only_whole_answers_of_both_are_compared() -> None:
    one = [answer(1, 2, 3), answer(1, 2, 3), answer(1)]
    other = [answer(1, 2, 3), dataclasses.replace(one[1], ids=[0, 1, 9]), answer(1, 2, 3)]
    assert equal(one, other) == {"compared": 2, "same": 1, "same_first": 2}


def test_a_load_is_the_same_for_everyone_and_as_dense_as_asked() -> None:
    found = load(5.0, 200.0, (10, 320), 1000, seed=3)
    assert found == load(5.0, 200.0, (10, 320), 1000, seed=3)
    assert found != load(5.0, 200.0, (10, 320), 1000, seed=4)
    assert abs(len(found) - 1000) < 5 * math.sqrt(1000)
    lengths = sorted(len(asked.token_ids) for asked in found)
    assert (lengths[0], lengths[-1]) == pytest.approx((10, 320), rel=0.05)
    assert lengths[len(lengths) // 2] == pytest.approx(math.sqrt(10 * 320), rel=0.2)
    assert all(0 <= asked.at < 200.0 for asked in found)


def test_the_table_says_never_where_there_is_no_figure() -> None:
    case = {"rate": 2.0, "side": "both", "chunk": 1024}
    found = figures([answer(1.0)], 1.0, GOAL)
    assert "| 2 | both | 1,024 | 1,000 ms | 1,000 ms | never | never | never | 0.00 | 0 of 1 |" in (
        table([{"case": case, "figures": found}])
    )


def test_the_slice_is_refused_without_a_gpu() -> None:
    with pytest.raises(SystemExit):
        parsed(["--devices", "0"])


async def test_both_ways_answer_the_same_tokens_and_leave_nothing() -> None:
    args = parsed(["--devices", "0", "--small", "--tokens", "6", "--at-once", "4"])
    settings = settings_of(args, "cpu")
    loaded = load_text(settings)
    asked = load(100.0, 0.04, (60, 200), 1000, seed=1)
    asked.append(Asked(at=0.0, token_ids=asked[0].token_ids[:64]))  # ends on a page's border
    assert len(asked) > 2
    apart = made_rooms("prefill", settings, loaded) + made_rooms("decode", settings, loaded)
    both = made_rooms("both", settings, loaded)
    set_chunk(both[0].engine, 64)
    came = {}
    for name, rooms in {"apart": apart, "both": both}.items():
        seats = [await room.open("127.0.0.1") for room in rooms]
        async with house_of(
            settings, [Seat(key=e.id, host=e.host, port=e.port) for e in seats]
        ) as h:
            side = Side(name=name, lines=[Line(h)], chunk=64)
            came[name] = await side.serve(asked, 6, 30.0, name)
        for room in rooms:
            assert room.memory.slots.held == room.memory.pages.held == 0
            room.memory.pages.check_integrity()
            await room.close()
    assert equal(came["apart"], came["both"])["same"] == len(asked)


def test_a_capture_is_charged_what_the_device_has_less_after_it() -> None:
    left = iter([(100, 10), (90, 15), (60, 15)])
    weighed = Weighed(Eager(), lambda: next(left))
    done: list[str] = []
    weighed.record(lambda: done.append("large"))()
    weighed.record(lambda: done.append("small"))
    assert weighed.taken() == [(10, 5), (30, 0)]
    assert done == ["large", "large", "small"]
