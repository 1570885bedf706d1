"""What sampling needs to know of a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from common.contract.messages import Sampling
from common.sampling.history import History
from common.sampling.masks import Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What sampling needs to know of one choice of one request."""

    sampling: Sampling
    choice: int = 0
    position: int = 0  # tokens this choice has emitted so far
    counts: Mapping[int, int] = field(default_factory=dict)  # how often each was emitted
    prompt: Collection[int] = ()  # distinct ids of the prompt; only the repetition penalty looks
    history: History | None = None  # the same two as a list that a device may keep; of this row
    mask: Mask | None = None  # ids that may come, a bit each, low bit first; None: all of them


def is_scripted_at(sampling: Sampling, position: int) -> bool:
    """Whether a script says the token at a position."""
    return sampling.script is not None and position < len(sampling.script)


def is_scripted(row: Row) -> bool:
    """Whether a script says the next token."""
    return is_scripted_at(row.sampling, row.position)


def changes_logits(row: Row) -> bool:
    """Whether logits of some ids are changed: by a bias, a minimum length or a penalty."""
    s = row.sampling
    return bool(
        s.logit_bias
        or row.position < s.min_tokens
        or s.repetition != 1
        or ((s.presence or s.frequency) and row.counts)
    )


def is_adjusted(row: Row) -> bool:
    """Whether the logits are changed or masked before the choice."""
    return row.mask is not None or changes_logits(row)
