"""Identity: what a replica writes on its tickets and compares on others'."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A replica in one of its lives, and the prints of what it serves."""

    id: str
    epoch: int
    model_print: str
    layout_print: str
