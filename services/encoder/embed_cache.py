"""EmbedCache: content hash → embeddings in registered memory, bounded.

An entry is *held* while a lease may still read it and merely *cached* otherwise; only cached
entries are evicted, least recently used first. Which lease holds what is the engine's business.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from common.cache.embed_arena import EmbedArena
from common.errors import CapacityError


@dataclass(slots=True)
class Entry:
    """The embeddings of one image."""

    key: bytes
    start: int  # first row in the arena
    tokens: int
    digest: int
    holds: int = 0
    probe_holds: int = 0  # holds by probes, which the inventory leaves out


class EmbedCache:
    """Entries by key, least recently used first. Touched by the engine's thread only."""

    def __init__(self, arena: EmbedArena) -> None:
        """The cache hands out the arena's rows and is its only user."""
        self.arena = arena
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def find(self, key: bytes) -> Entry | None:
        """The entry of `key`, now the most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, rows: Tensor, digest: int) -> Entry:
        """Store rows [tokens, hidden] and hold them once.

        Raises:
            CapacityError: the arena is full of entries that are still read.
        """
        start = self._room(rows.shape[0])
        self.arena.view(start).copy_(rows)
        entry = Entry(key=key, start=start, tokens=rows.shape[0], digest=digest)
        self._entries[key] = entry
        return entry

    def hold(self, entry: Entry, *, probe: bool) -> None:
        """Keep an entry until `drop`."""
        entry.holds += 1
        entry.probe_holds += probe

    def drop(self, entry: Entry, *, probe: bool) -> None:
        """Undo one `hold`."""
        entry.holds -= 1
        entry.probe_holds -= probe
        if not entry.holds and self._entries.get(entry.key) is not entry:
            self.arena.give(entry.start)

    def forget(self, entry: Entry) -> None:
        """Never hand an entry out again: what lies there is not what was made."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            if not entry.holds:
                self.arena.give(entry.start)

    def counts(self) -> tuple[int, int]:
        """(entries held by requests, entries only cached)."""
        held = sum(1 for entry in self._entries.values() if entry.holds > entry.probe_holds)
        cached = sum(1 for entry in self._entries.values() if entry.holds == 0)
        return held, cached

    def _room(self, rows: int) -> int:
        while True:
            try:
                return self.arena.take(rows)
            except CapacityError:
                victim = next((e for e in self._entries.values() if e.holds == 0), None)
                if victim is None:
                    raise
                del self._entries[victim.key]
                self.arena.give(victim.start)
