"""Choosing: a step's tokens are chosen where its logits are.

A model that is one process chooses in it. In a group each lane's logits stay with the lane: what
sampling needs to know of its rows goes there as plain data, and tokens come back. Noise is keyed by
what the row is, so a token does not depend on where it was chosen. Books (what was emitted, where a
form stands, who ends) stay with the leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace
from torch import Tensor

from common.contract.messages import TokenOut
from common.errors import DeadEnd, PoisonedState, ServingError
from common.model.batch import Forward, Memory, StepBatch
from common.runtime.grouped import GroupModel
from common.runtime.leading import Leading
from common.runtime.orders import Choose, Chosen, RowOrder
from common.runtime.recorder import settle
from common.sampling.sampler import Row, sample

CHOOSE_S = 60.0  # for a rank to end its pass; a lost one is noticed long before
FAULTS: dict[str, type[ServingError]] = {kind.code: kind for kind in (PoisonedState, DeadEnd)}
Result = TokenOut | ServingError


class Stepper(Forward, Protocol):
    """Passes of an engine, and steps with their tokens."""

    def step(self, batch: StepBatch, memory: Memory) -> Tensor:
        """A pass whose logits are for `sample` alone, before the next pass."""

    def sample(self, logits: Tensor, rows: Sequence[Row], lanes: Sequence[int]) -> list[Result]:
        """As `common.sampling.sampler.sample`, of rows in the order of their shares.

        Waits until the pass has ended, also without rows.
        """


class Near:
    """All in this process."""

    def __init__(self, model: Forward) -> None:
        """Take whatever runs passes."""
        self.forward = self.step = model.forward

    def sample(self, logits: Tensor, rows: Sequence[Row], lanes: Sequence[int]) -> list[Result]:
        """See `Stepper`."""
        if not rows:
            settle(logits)
        return sample(logits, rows)


class Far:
    """Over the lanes of a group, whose leader this is."""

    def __init__(self, leading: Leading, model: GroupModel) -> None:
        """Take the group and this rank's part of its model."""
        self._leading, self.forward, self.step = leading, model.forward, model.keep

    def sample(self, logits: Tensor, rows: Sequence[Row], lanes: Sequence[int]) -> list[Result]:
        """See `Stepper`."""
        found: list[Result | None] = [None] * len(rows)
        places: dict[int, list[int]] = {}
        for place, lane in enumerate(lanes):
            places.setdefault(lane, []).append(place)
        own = places.pop(0, [])
        asked = [
            self._leading.choose(lane, tuple(row_order(rows[at]) for at in here))
            for lane, here in places.items()
        ]
        if not own:
            settle(logits)
        results = [sample(logits, [rows[at] for at in own])]
        results += map(results_of, self._leading.await_all(asked, CHOOSE_S, lambda: False))
        for here, told in zip([own, *places.values()], results, strict=True):
            for at, result in zip(here, told, strict=True):
                found[at] = result
        return [result for result in found if result is not None]


def row_order(row: Row) -> RowOrder:
    """A row as plain data; counts and prompt only where a penalty looks at them."""
    s = row.sampling
    looks = s.repetition != 1 or s.presence or s.frequency
    return RowOrder(
        sampling=replace(s, grammar=None),  # the mask says where it stands
        choice=row.choice,
        position=row.position,
        counts=dict(row.counts) if looks else {},
        prompt=tuple(row.prompt) if s.repetition != 1 else (),
        mask=None if row.mask is None else bytes(row.mask),
    )


def chosen(order: Choose, logits: Tensor) -> Chosen:
    """A rank's answer: it samples the rows of the pass before."""
    rows = [
        Row(
            sampling=row.sampling,
            choice=row.choice,
            position=row.position,
            counts=row.counts,
            prompt=row.prompt,
            mask=row.mask,
        )
        for row in order.rows
    ]
    results = sample(logits, rows)
    return Chosen(
        number=order.number,
        tokens=tuple(result for result in results if isinstance(result, TokenOut)),
        faults={
            at: (result.code, str(result))
            for at, result in enumerate(results)
            if isinstance(result, ServingError)
        },
    )


def results_of(told: Chosen) -> list[Result]:
    """What a rank's sampling returned, in the order of its rows."""
    tokens = iter(told.tokens)
    found: list[Result] = []
    for at in range(len(told.tokens) + len(told.faults)):
        if at in told.faults:
            code, text = told.faults[at]
            found.append(FAULTS.get(code, ServingError)(text))
        else:
            found.append(next(tokens))
    return found
