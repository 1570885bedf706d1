"""Where a request goes: near its images, away from queues, never to a pair that must not serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.pairs import PASSES_TO_RETURN, STALLS_TO_LEAVE, Pairs
from router.placement import Candidate, choose_encoder, choose_prefill, order_decodes


def seat(name: str, **facts) -> Candidate:
    return Candidate(id=name, epoch=facts.pop("epoch", 1), **facts)


def anyone(_prefill, _decode) -> bool:
    return True


DECODE = seat("d")


def test_an_image_meets_the_same_encoder_whatever_comes_after_it():
    encoders = [seat(f"e{i}") for i in range(5)]
    assert choose_encoder([b"a"], encoders) == choose_encoder([b"a", b"b"], encoders)


def test_images_spread_over_encoders_and_a_leaver_moves_only_its_own():
    encoders = [seat(f"e{i}") for i in range(4)]
    images = [bytes([i, 7]) for i in range(200)]
    before = {image: choose_encoder([image], encoders) for image in images}
    assert {list(before.values()).count(e.id) > 20 for e in encoders} == {True}
    after = {image: choose_encoder([image], encoders[:3]) for image in images}
    assert all(after[i] == before[i] for i in images if before[i] != "e3")


def test_an_avoided_encoder_is_taken_only_when_there_is_no_other():
    both = [seat("e0"), seat("e1")]
    first = choose_encoder([b"x"], both)
    other = choose_encoder([b"x"], both, avoid={first})
    assert {first, other} == {"e0", "e1"}
    assert choose_encoder([b"x"], [seat("e0")], avoid={"e0"}) == "e0"
    assert choose_encoder([b"x"], [seat("e0", suspended=True)]) is None


def test_prefill_goes_to_the_shortest_queue_and_counts_what_was_just_sent():
    assert choose_prefill([seat("a", queued_tokens=9), seat("b")], DECODE, anyone) == "b"
    burst = [seat("a", assigned_tokens=900), seat("b", queued_tokens=500)]
    assert choose_prefill(burst, DECODE, anyone) == "b"


def test_a_cached_prefix_is_worth_its_tokens_of_queue():
    two = [seat("a", queued_tokens=100), seat("b")]
    assert choose_prefill(two, DECODE, anyone, saved={"a": 101}) == "a"
    assert choose_prefill(two, DECODE, anyone, saved={"a": 99}) == "b"


def test_a_pair_out_of_service_is_never_chosen_even_when_the_other_is_to_be_avoided():
    two = [seat("a"), seat("b")]

    def only_a(prefill, _):
        return prefill.id == "a"

    assert choose_prefill(two, DECODE, only_a, avoid={"a"}) == "a"
    assert choose_prefill([seat("b")], DECODE, only_a) is None
    assert choose_prefill([seat("a", suspended=True)], DECODE, only_a) is None


def test_decodes_come_by_free_slots_and_only_with_a_partner():
    decodes = [seat("x", free_slots=1), seat("y", free_slots=3), seat("z", free_slots=9)]

    def not_z(_, decode):
        return decode.id != "z"

    assert order_decodes(decodes, [seat("p")], not_z) == ["y", "x"]
    assert order_decodes(decodes, [seat("p", suspended=True)], not_z) == []
    assert order_decodes(decodes, [seat("p")], anyone, avoid={"z"})[-1] == "z"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=6),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
def test_prefill_is_chosen_exactly_when_one_may_serve(facts, banned, avoided):
    prefills = [
        seat(str(i), suspended=suspended, queued_tokens=queued)
        for i, (suspended, queued) in enumerate(facts)
    ]

    def allowed(prefill, _):
        return int(prefill.id) not in banned

    chosen = choose_prefill(prefills, DECODE, allowed, avoid={str(i) for i in avoided})
    able = {c.id for c in prefills if not c.suspended and allowed(c, DECODE)}
    wanted = able - {str(i) for i in avoided}
    assert chosen in (wanted or able or {None})


def test_a_pair_serves_after_its_probe_and_only_in_that_epoch():
    pairs, p, d = Pairs(), seat("p"), seat("d")
    assert not pairs.usable(p, d)
    pairs.passed(p, d)
    assert pairs.usable(p, d)
    assert not pairs.usable(seat("p", epoch=2), d)
    assert not pairs.usable(p, seat("d", epoch=2))


def test_a_pair_that_failed_needs_several_passes_in_a_row():
    pairs, p, d = Pairs(), seat("p"), seat("d")
    pairs.passed(p, d)
    pairs.failed(p, d)
    for _ in range(PASSES_TO_RETURN - 1):
        pairs.passed(p, d)
    assert not pairs.usable(p, d)
    pairs.failed(p, d)
    for _ in range(PASSES_TO_RETURN):
        assert not pairs.usable(p, d)
        pairs.passed(p, d)
    assert pairs.usable(p, d)


def test_a_pair_whose_probes_bring_no_bytes_serves_on_until_that_is_no_accident():
    pairs, p, d = Pairs(), seat("p"), seat("d")
    pairs.stalled(p, d)
    assert not pairs.usable(p, d)  # it has proved nothing yet
    pairs.passed(p, d)
    for _ in range(2):  # a pass in between begins the count anew
        for _ in range(STALLS_TO_LEAVE - 1):
            pairs.stalled(p, d)
        assert pairs.usable(p, d)
        pairs.passed(p, d)
    for _ in range(STALLS_TO_LEAVE):
        pairs.stalled(p, d)
    assert not pairs.usable(p, d)
    pairs.passed(p, d)
    assert pairs.usable(p, d)


def test_verdicts_of_an_earlier_epoch_are_forgotten_and_those_of_the_absent_kept():
    pairs, p, d = Pairs(), seat("p"), seat("d")
    pairs.failed(p, d)
    pairs.forget_older([d])
    pairs.passed(p, d)
    assert not pairs.usable(p, d)
    pairs.forget_older([seat("p", epoch=2), d])
    pairs.passed(p, d)
    assert pairs.usable(p, d)
