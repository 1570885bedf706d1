"""The masks of a step's rows: one block of bits, filled beside the step's pass.

A row's mask is bytes, or a `Line` of such a block, which goes to a device as it is. Nothing here
knows a grammar: what fills the lines is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Position(Protocol):
    """A place in a grammar."""

    @property
    def width(self) -> int:
        """Bytes of its mask in a block."""


Fill = Callable[[Sequence[Any], NDArray[np.uint8]], None]  # positions; a line each to write


@dataclass(frozen=True, slots=True)
class Line:
    """One row's mask in a block."""

    block: Tensor  # uint8 [lines, bytes], on the host
    at: int

    def __bytes__(self) -> bytes:
        """Its bits: one an id, the lowest of a byte first."""
        return self.block[self.at].numpy().tobytes()


Mask = bytes | Line


class Masks:
    """Fills a step's masks in a thread of its own; one step at a time."""

    def __init__(self, fill: Fill, *, pinned: bool) -> None:
        """`fill` writes masks; `pinned` keeps them where a device copies without a detour."""
        self._fill, self._pinned = fill, pinned
        self._block = torch.empty(0, 0, dtype=torch.uint8)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, positions: Sequence[Position | None]) -> Filling:
        """Begin with the masks of a step; None for a row without one. All are of one vocabulary.

        The lines of the step before lose their meaning.
        """
        wanted = [position for position in positions if position is not None]
        if not wanted:
            return Filling([None] * len(positions), None)
        if len(wanted) > len(self._block):
            size = (1 << (len(wanted) - 1).bit_length(), wanted[0].width)
            self._block = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        block, count = self._block[: len(wanted)], 0
        lines: list[Line | None] = []
        for position in positions:
            lines.append(None if position is None else Line(block, count))
            count += position is not None
        return Filling(lines, self._thread.submit(self._fill, wanted, block.numpy()))

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class Filling:
    """Masks on their way."""

    def __init__(self, lines: list[Line | None], done: Future[None] | None) -> None:
        """`lines` are written when `done` is."""
        self._lines, self._done = lines, done

    def result(self) -> list[Line | None]:
        """Wait for every line."""
        if self._done is not None:
            self._done.result()
        return self._lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Masks of a batch as a device takes them."""

    lines: Tensor  # uint8 [lines, bytes], on the host
    places: list[int]  # of each masked row


def block_of(masks: Sequence[Mask], width: int, device: torch.device) -> Block:
    """Masks as one block of at least `width` bytes a line: the one they share, else a new one."""
    first = masks[0] if masks else None
    if isinstance(first, Line) and first.block.shape[1] >= width:
        lines = [mask for mask in masks if isinstance(mask, Line) and mask.block is first.block]
        if len(lines) == len(masks):
            return Block(lines=first.block, places=[line.at for line in lines])
    made = torch.zeros(
        len(masks), width, dtype=torch.uint8, pin_memory=device.type == "cuda" and bool(masks)
    )
    for line, mask in zip(made.numpy(), masks, strict=True):
        bits = np.frombuffer(bytes(mask), dtype=np.uint8)[:width]
        line[: len(bits)] = bits
    return Block(lines=made, places=list(range(len(masks))))
