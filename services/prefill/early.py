"""Offers that leave before their memory is final, and which layers are while a pass goes on.

A layer's state is final when the kernels of that layer have run, not when they were launched: on a
GPU an event behind them says so. What is said to be final is changed by nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.contract.messages import Offer
from common.transfer.owner import Early, OnEnd, Owner
from services.prefill.publish import parts_of
from services.prefill.work import Work


def borders_of(layers: int, groups: int) -> tuple[int, ...]:
    """Where groups of a slot's layers end, about equally large; the last border is the last layer.

    No group is empty, so there are at most as many as layers.
    """
    count = min(layers, groups)
    return tuple(layers * (n + 1) // count for n in range(count))


@dataclass(slots=True)
class Passing:
    """One pass over the model, in which prompts reach their ends."""

    layers: Sequence[int]  # the model's numbers of a slot's layers
    borders: tuple[int, ...]
    device: torch.device
    _marks: list[torch.cuda.Event | None] = field(default_factory=list)
    _final: int = 0

    def begin(self) -> None:
        """What earlier passes wrote is final when they are over."""
        self._mark()

    def after(self, layer: int) -> None:
        """All that `layer` writes was launched."""
        marked = len(self._marks) - 1
        if marked < len(self.borders) and layer == self.layers[self.borders[marked] - 1]:
            self._mark()

    def end(self) -> None:
        """Everything was launched."""
        self._mark()

    def final(self) -> int:
        """How many portions are final; from any thread."""
        while self._final < len(self._marks):
            mark = self._marks[self._final]
            if mark is not None and not mark.query():
                break
            self._final += 1
        return self._final

    def _mark(self) -> None:
        mark = None
        if self.device.type == "cuda":
            mark = torch.cuda.Event()
            mark.record(torch.cuda.current_stream(self.device))
        self._marks.append(mark)

    def offer(self, work: Work, owner: Owner, on_end: OnEnd) -> Offer:
        """Offer what the pass will finish; its full pages in front of the pass are final."""
        early = Early(final_pages=work.full_pages, borders=self.borders, final=self.final)
        parts = parts_of(work.memory, work.slot, work.canary_slot, work.pages)
        return owner.offer(work.job.request, parts, on_end, probe=work.job.probe, early=early)
