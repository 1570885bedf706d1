"""Which tokens the next prefill step computes. Pure: no model, no memory, no clock.

Steps cut prompts on the grid of 64 tokens from position 0 whatever the budget, so that a budget
never changes a request's bits (architecture, D6). The oldest request always gets at least one
chunk, so nothing starves; what is left goes to the requests with the fewest tokens to go, so that a
short prompt does not wait behind a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.config.spec import CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A prompt on its way: `done` tokens of `total` are computed; `done` is a multiple of 64."""

    done: int
    total: int

    @property
    def left(self) -> int:
        """Tokens to go."""
        return self.total - self.done


def plan_step(waiting: Sequence[Progress], *, step_tokens: int, max_batch: int) -> list[int]:
    """Share one step's budget.

    Args:
        waiting: prompts, oldest first.
        step_tokens: most tokens of the step; less than one chunk counts as one chunk.
        max_batch: most prompts of the step.

    Returns:
        Tokens for each prompt, 0 for those that wait: whole chunks, or all that is left.
    """
    shares = [0] * len(waiting)
    if not waiting:
        return shares
    shares[0] = min(CHUNK, waiting[0].left)
    budget, served = step_tokens - shares[0], 1
    order = sorted(range(len(waiting)), key=lambda at: (waiting[at].left, at))
    for at in order:
        more = _fitting(waiting[at].left - shares[at], budget)
        if more == 0 or (shares[at] == 0 and served == max_batch):
            continue
        served += shares[at] == 0
        shares[at] += more
        budget -= more
    return shares


def _fitting(left: int, budget: int) -> int:
    if left <= budget:
        return left
    return max(0, budget // CHUNK * CHUNK)
