"""DirectAxis: the sums of a lane's tensor ranks by stores into each other's memory.

Bits are those of any `Axis`: added in rank order in fp32, rounded once. Nothing waits for the host,
so a captured pass holds it. Every rank sends its values to all others, which suits the few rows
of a decode step. For ranks of one host (`window.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.config.spec import TextSpec
from common.ops.exchange import ALIGN
from common.parallel.collectives import Axis
from common.parallel.window import Window, open_window


class DirectAxis:
    """One rank's end; see `common.parallel.collectives.Axis`."""

    recordable = True

    def __init__(self, wired: Axis, window: Window, room: int) -> None:
        """`wired` joins the same ranks, for what is not sent directly; `room` as of `Shelf`."""
        from common.ops.exchange.triton_sums import Shelf

        self.size, self.index, self._wired = wired.size, wired.index, wired
        self._window, self._shelf = window, Shelf(ranks=wired.size, room=room)
        self._rounds = torch.zeros(1, dtype=torch.int32, device=window.own.device)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Axis`; x has whole words of 4 bytes."""
        from common.ops.exchange.triton_sums import gathered

        out = x.new_empty(self.size, *x.shape)
        if not x.numel():
            return list(out)
        every = out.view(self.size, -1).view(torch.int32)
        at = 0
        for words in self._pieces(x):
            self._put(words)
            gathered(self._window.own, self._rounds, every[:, at:], len(words), self._shelf)
            at += len(words)
        return list(out)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Axis`; x is bfloat16 or float32 and has whole words of 4 bytes."""
        from common.ops.exchange.triton_sums import added

        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.numel():
            return out
        for words, sums in zip(self._pieces(x), self._pieces(out), strict=True):
            self._put(words)
            added(self._window.own, self._rounds, sums.view(x.dtype), self._shelf)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Axis`; over the wire."""
        return self._wired.reduce_scatter(x)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Axis`; over the wire."""
        return self._wired.all_to_all(x, send, receive)

    def begin_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """See `Axis`; over the wire."""
        return self._wired.begin_all_to_all(x, send, receive)

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        words = x.contiguous().view(-1).view(torch.int32)
        return tuple(torch.split(words, self._shelf.room // 4))

    def _put(self, words: Tensor) -> None:
        from common.ops.exchange.triton_sums import put

        put(words, self._window.addresses, self._rounds, self.index, self._shelf)


def room_of(text: TextSpec, rows: int, dtype: torch.dtype) -> int:
    """Bytes of the widest sum of a pass of `rows` rows: a layer's routed and shared experts."""
    row = text.hidden + (text.moe.latent or text.hidden)
    return -(-rows * row * dtype.itemsize // ALIGN) * ALIGN


def open_direct_axis(axis: Axis, room: int, device: torch.device) -> DirectAxis:
    """Share windows for values of `room` bytes at a time; all ranks of the axis call this together.

    More than that goes in pieces. `room` as of `room_of`.

    Raises:
        BackendUnsupported: as of `open_window`.
    """
    from common.ops.exchange.triton_sums import Shelf

    window = open_window(axis, Shelf(ranks=axis.size, room=room).size, device)
    return DirectAxis(axis, window, room)
