"""Balancing experts: every expert is held, memory is kept to, and skewed traffic evens out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.parallel.placement import Placement, even
from services.decode.balance import Move, balance, imbalance, moves, settled


def skewed(experts: int, seed: int, power: float = 0.9) -> list[float]:
    """Rows an expert: a power law in random order, as popular experts lie anywhere."""
    ranks = list(range(1, experts + 1))
    random.Random(seed).shuffle(ranks)
    return [100_000 / rank**power for rank in ranks]


@given(
    load=st.lists(st.integers(0, 10_000), min_size=4, max_size=48),
    nodes=st.sampled_from([1, 2, 4]),
    inside=st.integers(1, 4),
    spare=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_every_expert_is_held_and_no_share_holds_more_than_it_can(load, nodes, inside, spare):
    shares = nodes * inside
    places = len(load) // shares + 1 + spare
    placement = balance(load, shares=shares, places=places, nodes=nodes)
    placement.check(len(load))
    assert len(placement.shares) == shares and max(map(len, placement.shares)) <= places
    for expert in range(len(load)):
        held = [s for s, share in enumerate(placement.shares) if expert in share]
        assert len({share // inside for share in held}) == 1  # copies stay on one node


@pytest.mark.parametrize(("experts", "shares", "spare"), [(896, 16, 2), (896, 32, 4), (256, 8, 2)])
def test_skewed_traffic_is_evened_out(experts, shares, spare) -> None:
    load = skewed(experts, seed=experts + shares)
    before = imbalance(load, even(experts, shares))
    after = imbalance(load, balance(load, shares=shares, places=experts // shares + spare))
    assert before > 1.5 and after < 1.1


def test_balancing_inside_nodes_stays_near_the_free_choice() -> None:
    load = skewed(896, seed=5)
    before = imbalance(load, even(896, 32))
    placement = balance(load, shares=32, places=32, nodes=4)
    assert imbalance(load, placement) < 1.3 < before


def test_equal_traffic_is_left_balanced() -> None:
    assert imbalance([5.0] * 32, balance([5.0] * 32, shares=4, places=8)) == 1.0
    assert imbalance([0.0] * 8, even(8, 4)) == 1.0


def test_only_what_changes_hands_moves() -> None:
    old = Placement(((0, 1), (2, 3)))
    new = settled(old, Placement(((2, 0), (1, 3))))
    assert new.shares == ((0, 2), (1, 3))
    assert moves(old, new) == (
        Move(share=0, place=1, expert=2, source=1),
        Move(share=1, place=0, expert=1, source=0),
    )
    assert moves(old, settled(old, Placement(((1, 0), (3, 2))))) == ()


def test_moves_lead_from_the_old_placement_to_the_new() -> None:
    old = even(64, 8)
    new = settled(old, balance(skewed(64, seed=1), shares=8, places=10))
    memory = [list(share) for share in old.shares]
    for move in moves(old, new):
        assert move.expert in old.shares[move.source]
        memory[move.share][move.place : move.place + 1] = [move.expert]
    assert [tuple(share) for share in memory] == list(new.shares)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ConfigError, match="give each at least 3 places"):
        balance([1.0] * 9, shares=3, places=2)
    with pytest.raises(ConfigError, match="3 shares do not divide over 2 nodes"):
        balance([1.0] * 9, shares=3, places=4, nodes=2)
