"""Masks of a step, filled together beside its pass: those of each matcher alone."""

import pytest

from common.grammar.library import Filler
from common.sampling.masks import Masks
from tests.support.walks import PERSON, TOKENIZER, plain, schema_form, vocabulary


def test_many_masks_at_once_are_the_masks_of_each():
    start = vocabulary().compile(schema_form(PERSON).grammar)
    emitted = list(TOKENIZER.encode('{"name": "Ada"}'))
    walks = [[], emitted[:1], emitted[:4], emitted, [*emitted, TOKENIZER.end_of_msg], [5], [5, 6]]
    alone, together = ([start.copy() for _ in walks] for _ in range(2))
    masks = Masks(Filler(), pinned=False)
    for step in range(3):  # tokens come singly, in numbers, and not at all
        for matchers in (alone, together):
            for matcher, walk in zip(matchers, walks, strict=True):
                matcher.take(*(walk[:1], walk[1:], [])[step])
        lines = masks.begin([None, *together]).result()
        assert lines[0] is None
        for line, matcher in zip(lines[1:], alone, strict=True):
            assert bytes(line) == matcher.mask()[: matcher.width]
            assert not any(matcher.mask()[matcher.width :])
    masks.close()


def test_more_masks_than_before_find_room_and_none_take_no_thread():
    start = vocabulary().compile(plain('"x"'))
    fills = []
    masks = Masks(lambda matchers, lines: fills.append(lines.shape), pinned=False)
    assert masks.begin([None, None]).result() == [None, None] and not fills
    for count in (1, 3, 2, 9):
        assert len(masks.begin([start] * count).result()) == count
    assert fills == [(count, start.width) for count in (1, 3, 2, 9)]
    masks.close()


def test_a_fault_while_filling_reaches_who_waits():
    def fail(matchers, lines):
        raise RuntimeError("no memory")

    masks = Masks(fail, pinned=False)
    with pytest.raises(RuntimeError, match="no memory"):
        masks.begin([vocabulary().compile(plain('"x"'))]).result()
    masks.close()
