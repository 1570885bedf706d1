"""Pools: one span a slot, kept digests of pages, headers that must agree, runs of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.embed_arena import EmbedArena
from common.cache.kda_pool import StatePool
from common.cache.layout import wire_layout
from common.cache.mla_pool import LatentPool, pages_of
from common.errors import CapacityError, HandoffRefused
from common.transfer.digest import digest_latents, digest_slot
from tests.support.wire import DTYPE, SPEC


def states(slots: int = 3) -> StatePool:
    return StatePool(SPEC, slots, dtype=DTYPE, device="cpu")


def latents(pages: int = 6) -> LatentPool:
    pool = LatentPool(SPEC, pages, dtype=DTYPE, device="cpu")
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(3)))
    return pool


def bytes_at(tensor: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)[offset : offset + size]


def test_a_slot_is_one_span_of_each_tensor():
    pool = states()
    pool.state[1], pool.conv[1] = 1.0, 2.0
    span = pool.span(1)
    inside = bytes_at(pool.state, span["state"].offset, span["state"].size).view(torch.float32)
    assert inside.numel() == pool.state[1].numel() and (inside == 1).all()
    inside = bytes_at(pool.conv, span["conv"].offset, span["conv"].size).view(DTYPE)
    assert inside.numel() == pool.conv[1].numel() and (inside == 2).all()


def test_the_header_follows_its_request_and_refuses_another():
    pool = states()
    pool.begin(0, b"mine")
    assert pool.advance(0, b"mine", 64) == 64
    with pytest.raises(HandoffRefused, match="nonce") as refused:
        pool.advance(0, b"other", 1)
    assert refused.value.part == "nonce"
    with pytest.raises(HandoffRefused) as refused:
        pool.expect(0, b"mine", 63)
    assert refused.value.part == "token_count"
    pool.expect(0, b"mine", 64)


def test_a_new_owner_finds_an_empty_slot_unless_it_was_filled_for_it():
    pool = states()
    pool.state[0], pool.conv[0] = 1.0, 1.0
    pool.begin(0, b"a", tokens=7, zero=False)
    assert pool.header(0) == (b"a", 7) and pool.state[0].all()
    pool.begin(0, b"b")
    assert pool.header(0) == (b"b", 0)
    assert not pool.state[0].any() and not pool.conv[0].any()


def test_a_copied_slot_has_the_same_signature_and_header():
    pool = states()
    pool.begin(0, b"a")
    pool.state[0].normal_(), pool.conv[0].normal_()
    pool.advance(0, b"a", 5)
    pool.copy(0, 2)
    assert pool.sign(2) == pool.sign(0) == digest_slot(pool.state[0], pool.conv[0], SPEC.kda_layers)
    assert pool.header(2) == (b"a", 5)


def test_neighbouring_pages_become_one_span():
    pool = latents()
    sizes = [
        (span.offset // pool.page_bytes, span.size // pool.page_bytes)
        for span in pool.spans([1, 2, 3, 0, 5])
    ]
    assert sizes == [(1, 3), (0, 1), (5, 1)]


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 130, 192])
def test_kept_digests_equal_measured_ones(num_tokens):
    pool, pages = latents(), [4, 0, 1][: pages_of(num_tokens)]
    pool.sign(pages[: num_tokens // 64], 0)
    signed = pool.signed(pages, num_tokens)
    assert signed == pool.measure(pages, num_tokens)
    assert signed == digest_latents(pool.pages[torch.tensor(pages)], SPEC.mla_layers, num_tokens)


def test_a_page_changed_after_it_was_made_still_has_its_first_digest():
    pool = latents()
    pool.sign([2], 0)
    before = pool.signed([2], 64)
    pool.pages[2, 0, 5, 1] += 1
    assert pool.signed([2], 64) == before
    assert pool.measure([2], 64) != before


def test_an_unsigned_page_or_one_signed_elsewhere_cannot_be_published():
    pool = latents()
    pool.sign([2], 1)
    with pytest.raises(ValueError, match="not signed as page 0"):
        pool.signed([2], 64)
    pool.sign([2], 0)
    pool.open([2])
    with pytest.raises(ValueError, match="not signed as page 0"):
        pool.signed([2], 64)


def test_what_lies_behind_the_last_token_is_cleared():
    pool = latents()
    before = pool.pages.clone()
    pool.zero_rest([3, 1], 70)
    assert not pool.pages[1, :, 6:].any()
    pool.pages[1, :, 6:] = before[1, :, 6:]
    assert torch.equal(pool.pages, before)
    pool.zero_rest([3, 1], 128)
    assert torch.equal(pool.pages, before)


def test_a_copied_page_keeps_its_digest():
    pool = latents()
    pool.sign([2], 0)
    pool.copy(2, 4)
    assert pool.signed([4], 64) == pool.signed([2], 64) == pool.measure([4], 64)


def test_pools_state_the_facts_of_the_layout_print():
    arena = EmbedArena(4, SPEC.hidden, dtype=DTYPE, device="cpu")
    together = states().layout() | latents().layout() | arena.layout()
    assert together == wire_layout(SPEC, DTYPE)
    assert wire_layout(SPEC, torch.float32) != together


def test_rows_come_in_runs_and_touching_free_runs_merge():
    arena = EmbedArena(10, 8, dtype=DTYPE, device="cpu")
    a, b, c = arena.take(3), arena.take(3), arena.take(4)
    assert (a, b, c) == (0, 3, 6)
    arena.give(a), arena.give(c)
    with pytest.raises(CapacityError, match="no 5 embedding rows"):
        arena.take(5)
    arena.give(b)
    assert arena.take(10) == 0 and arena.view(0).shape == (10, 8)
    assert arena.span(0).size == 10 * arena.row_bytes
    with pytest.raises(ValueError, match="no run"):
        arena.give(5)


@settings(max_examples=50, deadline=None)
@given(acts=st.lists(st.tuples(st.booleans(), st.integers(1, 7)), max_size=50))
def test_any_history_of_runs_loses_no_row(acts):
    arena, taken = EmbedArena(16, 2, dtype=DTYPE, device="cpu"), {}
    for take, n in acts:
        if take:
            try:
                start = arena.take(n)
            except CapacityError:
                continue
            assert not any(start < s + c and s < start + n for s, c in taken.items())
            taken[start] = n
        elif taken:
            start = sorted(taken)[n % len(taken)]
            del taken[start]
            arena.give(start)
        arena.check_integrity()
        assert arena.held == sum(taken.values()) and arena.free == 16 - arena.held
