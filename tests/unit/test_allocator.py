"""Places are handed out once, counted, and come back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.allocator import Allocator
from common.errors import CapacityError


def test_lowest_numbers_come_first_so_that_spans_stay_long():
    places = Allocator(5)
    assert places.take(3) == (0, 1, 2)
    places.give([1])
    assert places.take(2) == (1, 3)


def test_too_large_a_wish_takes_nothing():
    places = Allocator(3)
    places.take(1)
    with pytest.raises(CapacityError, match="3 places are wanted, 2 of 3 are free"):
        places.take(3)
    assert (places.free, places.held) == (2, 1)


def test_a_shared_place_is_free_when_its_last_holder_left():
    places = Allocator(1)
    ids = places.take(1)
    places.share(ids)
    assert places.give(ids) == ()
    assert places.give(ids) == (0,)
    assert places.free == 1


@pytest.mark.parametrize("ids", [(0,), (7,), (-1,)])
def test_a_free_place_can_neither_be_shared_nor_given_back(ids):
    places = Allocator(2)
    with pytest.raises(ValueError, match="cannot be given back"):
        places.give(ids)
    with pytest.raises(ValueError, match="cannot be shared"):
        places.share(ids)
    places.check_integrity()


def test_giving_a_place_twice_in_one_call_is_found():
    places = Allocator(2)
    places.take(1)
    with pytest.raises(ValueError, match="more often"):
        places.give([0, 0])


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(0, 12),
    acts=st.lists(
        st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 12)), max_size=60
    ),
)
def test_any_history_agrees_with_a_plain_count(total, acts):
    places, counts = Allocator(total), Counter()
    for act, n in acts:
        held = sorted(number for number, count in counts.items() if count)
        if act == "take":
            if n > total - len(held):
                with pytest.raises(CapacityError):
                    places.take(n)
            else:
                counts.update(places.take(n))
        elif held:
            chosen = held[n % len(held)]
            (places.share if act == "share" else places.give)([chosen])
            counts[chosen] += 1 if act == "share" else -1
        places.check_integrity()
        assert places.held == sum(count > 0 for count in counts.values())
        assert all(places.holders(number) == counts[number] for number in range(total))
