"""The plain loop's answers against the record that came with the bundled checkpoint."""

import json

import pytest

from benchmarks.nano.cases import draw_cases
from benchmarks.nano.evaluate import Loop, to_record
from tests.support.golden import HERE, NANO

RECORDS = [json.loads(line) for line in (HERE / "nano_eval.jsonl").read_text().splitlines()]
SURE = 0.01  # a lead in logits that another order of summation does not turn over


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(NANO)


def check(loop: Loop, numbers: list[int]) -> None:
    drawn = draw_cases(len(RECORDS), 20001)
    cases = [drawn[i] for i in numbers]
    for number, case, answer in zip(numbers, cases, loop.answer(cases), strict=True):
        wanted = RECORDS[number]
        found = to_record(case, answer, loop, detailed="reference" in wanted)
        if wanted["margin"] < SURE:
            continue
        assert found["correct"] == wanted["correct"], wanted["id"]
        assert found["margin"] == pytest.approx(wanted["margin"], abs=2e-3), wanted["id"]
        if "reference" in wanted:
            check_reference(found["reference"], wanted["reference"])
        exact = {"correct", "margin", "reference"}
        assert {k: v for k, v in found.items() if k not in exact} == {
            k: v for k, v in wanted.items() if k not in exact
        }


def check_reference(found: dict, wanted: dict) -> None:
    assert found["prompt_ids"] == wanted["prompt_ids"]
    assert found["ids"] == wanted["ids"]
    for mine, theirs in zip(found["top5"], wanted["top5"], strict=True):
        likely = {token: value for token, value in theirs if value > -15}
        assert {t: v for t, v in mine if t in likely} == pytest.approx(likely, abs=1e-3)


def test_answers_are_those_of_the_record(loop: Loop) -> None:
    check(loop, [0, 6, 11, 17])  # a description, two pictures, a tool call, a colour


@pytest.mark.slow
def test_every_answer_is_that_of_the_record(loop: Loop) -> None:
    check(loop, list(range(len(RECORDS))))


def test_an_unfinished_or_other_reply_is_not_right(loop: Loop) -> None:
    case = draw_cases(1, 20001)[0]
    ids = RECORDS[0]["reference"]["ids"]
    assert loop.is_right(case, ids)
    assert not loop.is_right(case, ids[:-1])
    assert not loop.is_right(case, ids[1:])
