"""Which pairs of prefill and decode replicas have proved themselves with each other.

A verdict holds for one epoch of both. A pair that failed needs `PASSES_TO_RETURN` passing probes in
a row to come back: a wrong computation that shows only sometimes must not swing in and out. One
between which no bytes pass, `STALLS_TO_LEAVE` times in a row, needs one. Pure bookkeeping; who
probes is `router/readiness.py`.
"""

from __future__ import annotations

from collections import Counter

from router.placement import Candidate

PASSES_TO_RETURN = 3
STALLS_TO_LEAVE = 3  # probes in a row whose bytes did not come: the way between the two is broken


class Pairs:
    """How many passing probes each (prefill id, epoch, decode id, epoch) still owes."""

    def __init__(self) -> None:
        """No pair has been probed."""
        self._owed: dict[tuple[str, int, str, int], int] = {}
        self._stalls: Counter[tuple[str, int, str, int]] = Counter()

    def usable(self, prefill: Candidate, decode: Candidate) -> bool:
        """Whether the pair may serve."""
        return self._owed.get(_key(prefill, decode)) == 0

    def passed(self, prefill: Candidate, decode: Candidate) -> None:
        """A probe of the pair gave the right tokens."""
        key = _key(prefill, decode)
        self._owed[key] = max(0, self._owed.get(key, 1) - 1)
        self._stalls.pop(key, None)

    def failed(self, prefill: Candidate, decode: Candidate) -> None:
        """A probe or a canary showed a wrong computation: out of service."""
        self._owed[_key(prefill, decode)] = PASSES_TO_RETURN

    def stalled(self, prefill: Candidate, decode: Candidate) -> None:
        """A probe's bytes did not come, late or never: that says nothing of the computation."""
        key = _key(prefill, decode)
        owed = self._owed.setdefault(key, 1)
        self._stalls[key] += 1
        if self._stalls[key] >= STALLS_TO_LEAVE:
            self._owed[key] = max(1, owed)

    def count_usable(self, prefills: list[Candidate], decodes: list[Candidate]) -> int:
        """How many of these pairs may serve."""
        return sum(self.usable(p, d) for p in prefills for d in decodes)

    def forget_older(self, present: list[Candidate]) -> None:
        """Drop verdicts about an earlier epoch of a replica that is present in a later one."""
        epochs = {c.id: c.epoch for c in present}
        for p, p_epoch, d, d_epoch in list(self._owed):
            if epochs.get(p, p_epoch) != p_epoch or epochs.get(d, d_epoch) != d_epoch:
                del self._owed[p, p_epoch, d, d_epoch]
                self._stalls.pop((p, p_epoch, d, d_epoch), None)


def _key(prefill: Candidate, decode: Candidate) -> tuple[str, int, str, int]:
    return prefill.id, prefill.epoch, decode.id, decode.epoch
