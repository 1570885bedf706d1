"""What a choice has emitted, as a list of ids whose logits change: it grows, it is not made anew.

A device can keep a copy of the list and needs one entry a token to follow it. Built where a request
joins, a replay's tokens included; it goes with the choice. The module knows no device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.contract.messages import Sampling
from common.ops.draw import COUNT_SHIFT, HAS_BIAS, IS_SEEN, IS_STOP

MOST_IDS = 1 << 24  # no vocabulary has more
ENTRY_BYTES = 12
MOST_KEPT = 1 << 14  # places of a list that a device keeps; longer ones go over with every step

Entries = NDArray[np.int32]


class History:
    """The tokens of one choice."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt: Collection[int] = (),
        tokens: Iterable[int] | Mapping[int, int] = (),
    ) -> None:
        """Begin with what was emitted before; `prompt` counts only for a repetition penalty."""
        self.counts: Counter[int] = Counter(tokens)
        self.prompt = frozenset(prompt) if sampling.repetition != 1 else frozenset()
        self._sampling = sampling
        self._grows = bool(sampling.repetition != 1 or sampling.presence or sampling.frequency)
        self._entries: Entries | None = None  # made when first asked for
        self._places: dict[int, int] = {}
        self._size = 0
        self.kept: Any = None  # a device's copy of `entries` with their spare places
        self.late: list[int] = []  # places that the copy lacks

    def take(self, token: int) -> None:
        """Count a token that was emitted."""
        self.counts[token] += 1
        if self._entries is None or not self._grows:
            return
        place = self._places.get(token)
        if place is None:
            if self._size == len(self._entries):
                self._widen()
            place = self._places[token] = self._size
            self._size += 1
            self._entries[place, 0] = token
        self._entries[place, 1] += 1 << COUNT_SHIFT
        self.late.append(place)

    @property
    def size(self) -> int:
        """Entries; how many places follow them is nobody's business."""
        if self._entries is None:
            self._make()
        return self._size

    @property
    def spacious(self) -> Entries:
        """The entries and the zeros behind them, int32 [places, 3]: id, what happens to it (as
        `common.ops.draw` has it), and its bias as float32 bits. Every id comes once."""
        if self._entries is None:
            self._make()
        assert self._entries is not None
        return self._entries

    def _make(self) -> None:
        s = self._sampling
        bias, counts = s.logit_bias, self.counts if self._grows else {}
        stops = s.stop_ids if s.min_tokens else ()
        lists = [np.fromiter(x, np.int64, len(x)) for x in (bias, stops, self.prompt, counts)]
        ids = np.unique(np.concatenate(lists))
        what = np.zeros(len(ids), dtype=np.int64)
        biases, stopped, seen, counted = (np.searchsorted(ids, listed) for listed in lists)
        for bit, places in ((HAS_BIAS, biases), (IS_STOP, stopped), (IS_SEEN, seen)):
            what[places] |= bit
        what[counted] += np.fromiter(counts.values(), np.int64, len(counts)) << COUNT_SHIFT
        values = np.zeros(len(ids), dtype=np.float32)
        values[biases] = np.fromiter(bias.values(), np.float32, len(bias))
        held = (ids >= 0) & (ids < MOST_IDS)
        self._size = int(held.sum())
        self._entries = np.zeros((1 << (self._size + 15).bit_length(), 3), dtype=np.int32)
        rows = self._entries[: self._size]
        rows[:, 0], rows[:, 1], rows[:, 2] = ids[held], what[held], values[held].view(np.int32)
        if self._grows:
            self._places = dict(zip(ids[held].tolist(), range(self._size), strict=True))

    def _widen(self) -> None:
        assert self._entries is not None
        self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])
        self.kept = None
