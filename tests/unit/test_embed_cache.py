"""The encoder's cache: what is held stays, what is only cached makes room, what is doubted goes."""

import pytest
import torch

from common.cache.embed_arena import EmbedArena
from common.errors import CapacityError
from services.encoder.embed_cache import EmbedCache


@pytest.fixture
def cache():
    return EmbedCache(EmbedArena(4, 2, dtype=torch.float32, device="cpu"))


def rows(count, value=1.0):
    return torch.full((count, 2), value)


def test_the_entry_used_longest_ago_makes_room(cache):
    first, second = cache.put(b"a", rows(2), 1), cache.put(b"b", rows(2), 2)
    cache.find(b"a")
    cache.put(b"c", rows(2, 3.0), 3)
    assert cache.find(b"a") is first
    assert cache.find(b"b") is None
    assert second.start == cache.find(b"c").start
    cache.arena.check_integrity()


def test_held_entries_are_never_evicted(cache):
    for key in (b"a", b"b"):
        cache.hold(cache.put(key, rows(2), 0), probe=key == b"b")
    with pytest.raises(CapacityError):
        cache.put(b"c", rows(1), 0)
    assert cache.counts() == (1, 0)  # a probe's hold does not count


def test_a_forgotten_entry_keeps_its_rows_until_the_last_reader_left(cache):
    entry = cache.put(b"a", rows(4), 0)
    cache.hold(entry, probe=False)
    cache.hold(entry, probe=False)
    cache.forget(entry)
    assert cache.find(b"a") is None
    cache.drop(entry, probe=False)
    assert cache.arena.free == 0
    cache.drop(entry, probe=False)
    assert cache.arena.free == 4
    cache.forget(entry)
    assert cache.arena.free == 4


def test_an_idle_entry_is_forgotten_at_once(cache):
    cache.forget(cache.put(b"a", rows(4), 0))
    assert cache.arena.free == 4
