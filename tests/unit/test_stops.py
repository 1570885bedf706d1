from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stops import StopMatcher


def run(stops, pieces):
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece) for piece in pieces]
    return [*out, matcher.flush()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "text", "kept", "matched"),
    [
        (["DEFGHIJ"], "ABC DEFGHIJKLM", "ABC ", "DEFGHIJ"),
        (["DEFGHIJ"], "ABC DEFGH", "ABC DEFGH", None),
        (["D", "B"], "ABCD", "A", "B"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["bc", "abc"], "xabc", "x", "abc"),
        ([], "anything", "anything", None),
        (["aab"], "aaab", "a", "aab"),
        (["🌊"], "a🌊b", "a", "🌊"),
    ],
)
def test_text_ends_before_the_stop_string_that_ends_first(stops, text, kept, matched):
    for pieces in ([text], list(text)):
        out, hit = run(stops, pieces)
        assert ("".join(out), hit) == (kept, matched)


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["x"])
    assert [matcher.feed("axb"), matcher.feed("c"), matcher.flush()] == ["a", "", ""]


def naive(stops, text):
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start]
    return text


ab = st.text("ab", min_size=1, max_size=4)


@given(st.lists(ab, max_size=3), st.text("ab", max_size=12), st.lists(st.integers(0, 12)))
def test_every_cut_gives_what_a_search_of_the_whole_text_gives(stops, text, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert "".join(run(stops, pieces)[0]) == naive(stops, text)


@given(st.lists(ab, max_size=3), st.text("abc", max_size=12))
def test_text_is_held_back_only_while_it_may_become_a_stop_string(stops, text):
    matcher = StopMatcher(stops)
    let_out = ""
    for count, character in enumerate(text, 1):
        let_out += matcher.feed(character)
        if matcher.matched is not None:
            break
        held = text[len(let_out) : count]
        assert not held or any(stop.startswith(held) for stop in stops)
