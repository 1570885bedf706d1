"""EmbedArena: image embeddings in one registered tensor, a contiguous run of rows an image.

First fit over free ranges, merged again when given back. It knows rows, not images: what is kept
for whom, and for how long, is the encoder's cache and leases. Safe to call from any thread.
"""

from __future__ import annotations

import threading

import torch

from common.cache.layout import facts
from common.contract.regions import Span
from common.errors import CapacityError


class EmbedArena:
    """`rows` is [rows, hidden]; `take` hands out runs of rows by their first row."""

    def __init__(
        self, rows: int, hidden: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate zeroed memory for `rows` rows."""
        self.rows = torch.zeros((rows, hidden), dtype=dtype, device=device)
        self.row_bytes = hidden * dtype.itemsize
        self._free: list[tuple[int, int]] = [(0, rows)] if rows else []  # (start, count), ascending
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()
        self._layout = {"embed": facts((hidden,), dtype)}

    def layout(self) -> dict[str, object]:
        """This pool's share of the layout print."""
        return dict(self._layout)

    @property
    def free(self) -> int:
        """Free rows; the longest free run may be shorter."""
        with self._lock:
            return sum(count for _, count in self._free)

    @property
    def held(self) -> int:
        """Rows in use."""
        with self._lock:
            return sum(self._taken.values())

    def take(self, count: int) -> int:
        """Hand out `count` rows that follow each other; returns the first.

        Raises:
            CapacityError: no free run is long enough.
        """
        if count < 1:
            raise ValueError(f"cannot take {count} rows; ask for one or more")
        with self._lock:
            for at, (start, length) in enumerate(self._free):
                if length >= count:
                    left = [(start + count, length - count)] if length > count else []
                    self._free[at : at + 1] = left
                    self._taken[start] = count
                    return start
        raise CapacityError(
            f"no {count} embedding rows in a row are free of {self.rows.shape[0]}; try later"
        )

    def give(self, start: int) -> None:
        """Give a run back by its first row."""
        with self._lock:
            if start not in self._taken:
                raise ValueError(f"no run of rows starts at {start}")
            self._free.append((start, self._taken.pop(start)))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for first, count in self._free:
                if merged and sum(merged[-1]) == first:
                    merged[-1] = (merged[-1][0], merged[-1][1] + count)
                else:
                    merged.append((first, count))
            self._free = merged

    def view(self, start: int) -> torch.Tensor:
        """The run's rows: [count, hidden]."""
        with self._lock:
            return self.rows[start : start + self._taken[start]]

    def span(self, start: int) -> Span:
        """Where the run lies."""
        with self._lock:
            count = self._taken[start]
        return Span(pool="embed", offset=start * self.row_bytes, size=count * self.row_bytes)

    def check_integrity(self) -> None:
        """Raise AssertionError when runs overlap, leave a gap, or two free ones touch."""
        with self._lock:
            runs = sorted(
                [
                    *((s, c, True) for s, c in self._free),
                    *((s, c, False) for s, c in self._taken.items()),
                ]
            )
            at, was_free = 0, False
            for start, count, is_free in runs:
                assert start == at and count > 0, f"rows {at} to {start} are lost or held twice"
                assert not (is_free and was_free), f"free runs touch at row {start}"
                at, was_free = start + count, is_free
            assert at == self.rows.shape[0], "rows at the end are lost"
