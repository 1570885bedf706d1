"""What sampling needs to know of a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from common.contract.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What sampling needs to know of one choice of one request."""

    sampling: Sampling
    choice: int = 0
    position: int = 0  # tokens this choice has emitted so far
    counts: Mapping[int, int] = field(default_factory=dict)  # how often each was emitted
    prompt: Collection[int] = ()  # distinct ids of the prompt; only the repetition penalty looks
    mask: bytes | None = None  # ids that may come, a bit each, low bit first; None: all of them


def is_scripted(row: Row) -> bool:
    """Whether a script says the next token."""
    return row.sampling.script is not None and row.position < len(row.sampling.script)


def is_adjusted(row: Row) -> bool:
    """Whether the logits are changed or masked before the choice."""
    s = row.sampling
    return bool(
        row.mask is not None
        or s.logit_bias
        or row.position < s.min_tokens
        or s.repetition != 1
        or ((s.presence or s.frequency) and row.counts)
    )
