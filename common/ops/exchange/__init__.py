"""Rows straight into the memory of other ranks, and back: the device's part of an exchange.

Every rank has a window of the same layout, which all ranks write into: for each source rank as many
places as that rank may send rows, the expert wanted at each place, and flags. The place is the
choice (row * k + j), so nothing is counted, nothing waits for the host, and a captured pass
may hold it. There is one body: Triton's, for CUDA devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGN = 256  # bytes; every part of a window begins on a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the parts of a window lie, in bytes from its beginning."""

    ranks: int
    places: int  # of one source rank: most rows times choices of one
    width: int  # values of a row
    dtype: torch.dtype

    @property
    def flags(self) -> int:
        """int32 [2, ranks]: the last round that each rank has sent, and has answered."""
        return 0

    @property
    def wanted(self) -> int:
        """int32 [ranks, places]: this rank's expert for the row at each place; -1: no row."""
        return _up(self.flags + 2 * self.ranks * 4)

    @property
    def inbox(self) -> int:
        """[ranks, places, width]: rows that came."""
        return _up(self.wanted + self.ranks * self.places * 4)

    @property
    def home(self) -> int:
        """[places, width]: what the experts made of this rank's own rows, by choice."""
        return _up(self.inbox + self.ranks * self.places * self.width * self.dtype.itemsize)

    @property
    def size(self) -> int:
        """Bytes of a window."""
        return _up(self.home + self.places * self.width * self.dtype.itemsize)


def _up(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
