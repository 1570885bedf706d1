"""A world of three pools on a clock of its own, for `services.scaling.decide`.

Work arrives in replicas' worth: a load of 2.5 keeps two and a half replicas busy without pause.
What is not done waits. Prefill and encoder tell their backlog; decode only how full it is, as the
real one does, since its requests wait in the router. Replicas take time to start and to drain.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config.scaling import ScalingSettings
from services.scaling import STAGES, Decision, Memory, Report, Seen, bounds_of, decide

Load = Callable[[float], float]


@dataclass
class Pool:
    stage: str
    load: Load
    running: int
    start_s: float = 20.0
    drain_s: float = 5.0
    never_starts: bool = False
    reporting: Callable[[float, int], int] = lambda now, running: running
    target: int = 0
    starting: list[float] = field(default_factory=list)  # when each is up
    draining: list[float] = field(default_factory=list)  # when each is gone
    backlog: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=10))

    def step(self, now: float, dt: float) -> None:
        ready = [at for at in self.starting if at <= now]
        self.starting = [at for at in self.starting if at > now]
        self.running += len(ready)
        self.draining = [at for at in self.draining if at > now]
        arrived = self.load(now) * dt
        able = self.running * dt
        done = min(self.backlog + arrived, able)
        self.backlog += arrived - done
        self.recent.append((arrived / dt, done / dt, self.backlog))

    def seen(self, now: float) -> Seen:
        reporting = min(self.running, self.reporting(now, self.running))
        offered = sum(r[0] for r in self.recent) / len(self.recent) / max(1, self.running)
        busy = sum(r[1] for r in self.recent) / len(self.recent) / max(1, self.running)
        waits = self.backlog / max(1, self.running)
        if self.stage == "decode":
            report = Report(held=min(1.0, busy + waits))
        else:
            report = Report(busy=busy, offered=offered, backlog_s=waits)
        return Seen(
            running=self.running,
            leaving=len(self.draining),
            target=self.target,
            reports=(report,) * reporting,
            is_called=self.backlog > 0,
        )

    def obey(self, target: int, now: float) -> None:
        self.target = target
        while self.running + len(self.starting) < target:
            self.starting.append(float("inf") if self.never_starts else now + self.start_s)
        while self.running + len(self.starting) > target:
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1
                self.draining.append(now + self.drain_s)

    @property
    def devices(self) -> int:
        return self.running + len(self.starting) + len(self.draining)


@dataclass
class World:
    """Runs pools under the policy; `history` holds (now, targets, devices, waits in seconds)."""

    config: ScalingSettings
    pools: dict[str, Pool]
    now: float = 0.0
    memory: dict[str, Memory] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    history: list[tuple[float, dict[str, int], int, dict[str, float]]] = field(default_factory=list)

    def run(self, seconds: float, dt: float = 1.0) -> World:
        costs = {stage: bound.cost for stage, bound in bounds_of(self.config).items()}
        until = self.now + seconds
        while self.now < until:
            self.now += dt
            for pool in self.pools.values():
                pool.step(self.now, dt)
            seen = {stage: pool.seen(self.now) for stage, pool in self.pools.items()}
            self.decisions, self.memory = decide(seen, self.memory, self.config, self.now)
            for stage, decision in self.decisions.items():
                self.pools[stage].obey(decision.target, self.now)
            self.history.append(
                (
                    self.now,
                    {stage: pool.target for stage, pool in self.pools.items()},
                    sum(pool.devices * costs[stage] for stage, pool in self.pools.items()),
                    {s: p.backlog / max(p.running, 0.5) for s, p in self.pools.items()},
                )
            )
        return self

    def targets(self, stage: str, since: float = 0.0) -> list[int]:
        return [targets[stage] for now, targets, _, _ in self.history if now > since]

    def changes(self, stage: str, since: float = 0.0) -> int:
        told = self.targets(stage, since)
        return sum(a != b for a, b in itertools.pairwise(told))

    def turns(self, stage: str, since: float = 0.0) -> int:
        """How often the direction of change turned round."""
        told = self.targets(stage, since)
        moves = [b > a for a, b in itertools.pairwise(told) if a != b]
        return sum(a != b for a, b in itertools.pairwise(moves))

    def most_devices(self) -> int:
        return max(devices for _, _, devices, _ in self.history)

    def calm_after(self, stage: str, wait_s: float, since: float) -> float:
        """Seconds after `since` from which on nobody waits longer than `wait_s`."""
        late = [now for now, _, _, waits in self.history if now > since and waits[stage] > wait_s]
        return (late[-1] - since) if late else 0.0


def world(config: ScalingSettings, *, seed: int = 0, **loads: Load | float) -> World:
    """One pool a stage; a load is a number, which then trembles by 5 %, or a function of time."""
    noise = random.Random(seed)

    def steady(mean: float) -> Load:
        return lambda now: mean * noise.uniform(0.95, 1.05)

    pools = {}
    for stage in STAGES:
        load = loads.get(stage, 0.3)
        least = max(1, bounds_of(config)[stage].least)
        pools[stage] = Pool(
            stage=stage,
            load=load if callable(load) else steady(load),
            running=least,
            target=least,
        )
    return World(config=config, pools=pools)
