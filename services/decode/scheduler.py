"""Which choices the next decode step serves. Pure: no model, no memory, no clock.

Everything that runs is stepped every time while it fits; above `max_batch` the choices that waited
longest go first, so each gets its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Stepped(Protocol):
    """A running choice."""

    last_step: int  # number of the step that served it last


S = TypeVar("S", bound=Stepped)


def plan_step(running: Sequence[S], *, max_batch: int) -> list[S]:
    """The choices of the next step, at most `max_batch`, longest waiting first, in stable order."""
    if len(running) <= max_batch:
        return list(running)
    order = sorted(range(len(running)), key=lambda at: (running[at].last_step, at))
    return [running[at] for at in sorted(order[:max_batch])]
