"""How many replicas each stage should have: a pure function of figures, state and settings.

    need    what arrives and what waits, in replicas that work without pause
    want    need over `aim`, with a dead band: more above `high`, fewer below `low`
    target  want, once it stood for `up_s` or `down_s`, within bounds and under the budget

All stages are decided together, because they share one budget of devices. Nothing here knows Ray,
clocks or sockets: `services/scaling_hook.py` calls it for Serve, the tests' simulator for proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.config.scaling import ScalingSettings

STAGES = ("encoder", "prefill", "decode")
_FULL, _UNSEEN = 0.98, 1.5  # full slots hide how many wait: then half as many again
_EDGE = 1e-6  # a need of 1.4000000001 replicas is 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replica's figures, means over the last seconds.

    `busy`: share of time it worked; `offered`: seconds of work that arrived per second, above 1
    when it cannot keep up; `backlog_s`: seconds of work that wait; `held`: share of slots taken.
    """

    busy: float = 0.0
    offered: float = 0.0
    backlog_s: float = 0.0
    held: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One stage as it is now. `running` replicas serve; those that report are in `reports`.

    `leaving` ones finish what they hold and still have their devices.
    """

    running: int
    target: int
    reports: tuple[Report, ...] = ()
    leaving: int = 0
    is_called: bool = False  # someone waits for a replica of a stage that has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a stage remembers between two decisions; moments on the caller's clock, -1 for none."""

    above_since: float = -1.0
    below_since: float = -1.0
    below_want: int = 0  # the most that was wanted since then
    short_since: float = -1.0  # fewer run than the target says
    blocked_until: float = -1.0  # no growth before this: replicas did not start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one stage may have, and what a replica of it costs in devices."""

    least: int
    most: int
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A stage's target and, in one sentence, why. `enough`: how few would do, where it is known."""

    target: int
    reason: str
    is_frozen: bool = False
    enough: int | None = None


def bounds_of(config: ScalingSettings) -> dict[str, Bounds]:
    """The settings' bounds by stage."""
    return {
        stage: Bounds(
            least=getattr(config, f"{stage}_min"),
            most=getattr(config, f"{stage}_max"),
            cost=getattr(config, f"{stage}_cost"),
        )
        for stage in STAGES
    }


def need_of(seen: Seen, config: ScalingSettings) -> float:
    """Replicas' worth of work: what arrives, plus what waits spread over `backlog_s`.

    While replicas start, what waits is theirs: it asks for no further ones.
    """
    flow = sum(max(r.busy, r.offered) for r in seen.reports)
    held = sum(r.held for r in seen.reports)
    if seen.running >= seen.target:
        flow += sum(r.backlog_s for r in seen.reports) / config.backlog_s
        if held >= _FULL * len(seen.reports):
            held *= _UNSEEN
    return max(flow, held)


def decide(
    seen: Mapping[str, Seen],
    memory: Mapping[str, Memory],
    config: ScalingSettings,
    now: float,
) -> tuple[dict[str, Decision], dict[str, Memory]]:
    """Targets of all stages in `seen`, and what to remember for the next call."""
    bounds = bounds_of(config)
    wishes: dict[str, Decision] = {}
    kept: dict[str, Memory] = {}
    for stage, one in seen.items():
        wishes[stage], kept[stage] = _wish(
            one, memory.get(stage, Memory()), bounds[stage], config, now
        )
    decisions = _within_budget(seen, wishes, bounds, config.budget)
    for stage, decision in decisions.items():
        if decision.target > seen[stage].target:
            kept[stage] = replace(kept[stage], above_since=-1.0)
    return decisions, kept


def _wish(
    seen: Seen, memory: Memory, bounds: Bounds, config: ScalingSettings, now: float
) -> tuple[Decision, Memory]:
    """One stage alone: bounds, hysteresis, missing figures, replicas that never start."""
    memory = _watch_start(seen, memory, config, now)
    calm = replace(memory, above_since=-1.0, below_since=-1.0)
    if now < memory.blocked_until and seen.target > seen.running:
        wait_s = config.start_s
        target = max(seen.running, min(bounds.least, seen.target))
        return Decision(target=target, reason=f"none started within {wait_s:g} s"), calm
    if not bounds.least <= seen.target <= bounds.most:
        target = min(max(seen.target, bounds.least), bounds.most)
        return Decision(target=target, reason="the bounds of the settings"), calm
    if not seen.running:
        target = max(seen.target, int(seen.is_called))
        reason = "a request waits for the first replica" if seen.is_called else "none is asked for"
        return Decision(target=target, reason=reason), calm
    if not seen.reports:
        frozen = Decision(target=seen.target, reason="no replica reports", is_frozen=True)
        return frozen, calm
    return _follow(seen, memory, bounds, config, now)


def _watch_start(seen: Seen, memory: Memory, config: ScalingSettings, now: float) -> Memory:
    if seen.running >= seen.target:
        return replace(memory, short_since=-1.0)
    if memory.short_since < 0:
        return replace(memory, short_since=now)
    if now - memory.short_since > config.start_s:
        return replace(memory, short_since=-1.0, blocked_until=now + config.retry_s)
    return memory


def _follow(
    seen: Seen, memory: Memory, bounds: Bounds, config: ScalingSettings, now: float
) -> tuple[Decision, Memory]:
    """Move towards what is needed, once that has been so for long enough."""
    need, target = need_of(seen, config), seen.target
    want = min(max(math.ceil(need / config.aim - _EDGE), bounds.least), bounds.most)
    text = f"{need:.2f} replicas' worth of work"
    is_above = want > target and need > config.high * target
    is_below = want < target and need < max(_EDGE, config.low * (target - 1))
    memory = replace(
        memory,
        above_since=_since(memory.above_since, is_above, now),
        below_since=_since(memory.below_since, is_below, now),
        below_want=max(want, memory.below_want) if is_below else 0,
    )
    if is_above and now < memory.blocked_until:
        return Decision(target=target, reason=f"{text}, but replicas did not start"), memory
    if is_above and now - memory.above_since >= config.up_s:
        return Decision(target=want, reason=text), memory
    if is_below and len(seen.reports) < seen.running:
        held = f"{text}, but only {len(seen.reports)} of {seen.running} report"
        return Decision(target=target, reason=held, is_frozen=True), replace(
            memory, below_since=-1.0
        )
    if is_below and now - memory.below_since >= config.down_s:
        return Decision(target=memory.below_want, reason=text), replace(
            memory, below_since=-1.0, below_want=0
        )
    is_whole = len(seen.reports) == seen.running == target
    return Decision(target=target, reason=text, enough=want if is_whole else None), memory


def _since(before: float, is_so: bool, now: float) -> float:
    if not is_so:
        return -1.0
    return before if before >= 0 else now


def _within_budget(
    seen: Mapping[str, Seen],
    wishes: Mapping[str, Decision],
    bounds: Mapping[str, Bounds],
    budget: int,
) -> dict[str, Decision]:
    """Grant growth replica by replica, the stage that lacks most first, while devices last.

    A replica that leaves counts until it is gone.
    """
    granted = {stage: min(wish.target, seen[stage].target) for stage, wish in wishes.items()}
    if not budget:
        return dict(wishes)

    def used() -> int:
        return sum(
            (max(granted[s], seen[s].running) + seen[s].leaving) * bounds[s].cost for s in granted
        )

    while True:
        lacking = [s for s in granted if granted[s] < wishes[s].target]
        fitting = [
            s for s in lacking if granted[s] < seen[s].running or used() + bounds[s].cost <= budget
        ]
        if not fitting:
            break
        first = min(fitting, key=lambda s: (granted[s] / max(1, wishes[s].target), s))
        granted[first] += 1
    if lacking:
        wishes = _with_donor(seen, wishes, granted, lacking)
    return {
        stage: wish
        if wish.target <= granted[stage]
        else replace(
            wish,
            target=granted[stage],
            reason=f"{wish.reason}; {wish.target} wanted, the budget of {budget} devices is spent",
        )
        for stage, wish in wishes.items()
    }


def _with_donor(
    seen: Mapping[str, Seen],
    wishes: Mapping[str, Decision],
    granted: Mapping[str, int],
    lacking: list[str],
) -> dict[str, Decision]:
    """Let one stage give a replica up; the one that lacks most gets its device when it is gone.

    A stage gives what it does not need; if none can, one that lacks less gives, as long as it stays
    better off than the other is now.
    """
    first = min(lacking, key=lambda s: (granted[s] / wishes[s].target, s))
    settled = [s for s in wishes if s != first and seen[s].running == granted[s] > 1]
    spare = {s: granted[s] - (wishes[s].enough or granted[s]) for s in settled}
    donor = max(spare, key=lambda s: (spare[s], s), default="")
    if not donor or spare[donor] <= 0:
        share = {s: (granted[s] - 1) / wishes[s].target for s in settled if s in lacking}
        donor = max(share, key=lambda s: (share[s], s), default="")
        if not donor or share[donor] <= granted[first] / wishes[first].target:
            return dict(wishes)
    reason = f"{wishes[donor].reason}; one is given to {first}"
    return dict(wishes) | {donor: replace(wishes[donor], target=granted[donor] - 1, reason=reason)}
