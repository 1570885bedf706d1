"""A room's figures for scaling, from what its heartbeats say: differences over a sliding window.

Knows which counter of a room is its work and which its working time. Pure: the caller brings clock
and heartbeat.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.contract.messages import Load

_WORK = {  # work done, seconds spent on it
    "encoder": ("baton_images_total", "baton_encode_seconds_sum"),
    "prefill": ("baton_prefill_tokens_total", "baton_prefill_step_seconds_sum"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at: float  # seconds
    done: float
    spent_s: float
    queued: float


class Meter:
    """Figures of one replica; decode has no rate, it tells how full it is."""

    def __init__(self, room: str, window_s: float) -> None:
        """`window_s`: the figures are means over so many seconds."""
        self._room, self._window_s = room, window_s
        self._marks: deque[_Mark] = deque()
        self._rate = 0.0  # work a second of working time, the last that was measured

    def take(self, now: float, load: Load) -> dict[str, float]:
        """Add a heartbeat; returns busy, offered, backlog_s and held, as `services.scaling` has it.

        All are 0 before two heartbeats are known.
        """
        held = _held(load) if self._room == "decode" else 0.0
        if self._room not in _WORK:
            return {"busy": 0.0, "offered": 0.0, "backlog_s": 0.0, "held": held}
        work, spent = _WORK[self._room]
        mark = _Mark(
            at=now,
            done=load.counters.get(work, 0.0),
            spent_s=load.counters.get(spent, 0.0),
            queued=float(load.queued_tokens or load.queued),
        )
        self._marks.append(mark)
        while len(self._marks) > 2 and self._marks[1].at <= now - self._window_s:
            self._marks.popleft()
        return self._figures(self._marks[0], mark) | {"held": held}

    def _figures(self, first: _Mark, last: _Mark) -> dict[str, float]:
        passed, done = last.at - first.at, last.done - first.done
        spent_s = last.spent_s - first.spent_s
        if done > 0 and spent_s > 0:
            self._rate = done / spent_s
        if passed <= 0 or not self._rate:
            return {"busy": 0.0, "offered": 0.0, "backlog_s": 0.0}
        arrived = max(0.0, done + last.queued - first.queued)
        return {
            "busy": min(1.0, spent_s / passed),
            "offered": arrived / self._rate / passed,
            "backlog_s": last.queued / self._rate,
        }


def _held(load: Load) -> float:
    """Share of the scarcer of slots and pages that is taken."""
    pairs = ((load.free_slots, load.total_slots), (load.free_pages, load.total_pages))
    return max((1 - free / total for free, total in pairs if total), default=0.0)
