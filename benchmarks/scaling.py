"""What the scaling policy does in the simulator of the tests, as the table of docs/operate.md.

python -m benchmarks.scaling
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.config.scaling import ScalingSettings
from tests.support.pools import World, world

CONFIG = ScalingSettings(
    enabled=True, up_s=5.0, down_s=60.0, start_s=120.0, retry_s=300.0, budget=8, encoder_min=0
)
HEAD = """\
| replicas' worth of work | stage | targets | changes | turns | calm after | devices |
|---|---|---|---|---|---|---|"""
CALM_S = 1.0  # nobody waits longer for a replica


@dataclass(frozen=True)
class Scene:
    """One course of events; `at` is when it changes, `stage` the one that is looked at."""

    name: str
    stage: str
    world: Callable[[], World]
    seconds: float
    at: float
    dt: float = 1.0


def step(before: float, after: float, at: float) -> Callable[[float], float]:
    """A load that changes once."""
    return lambda now: before if now < at else after


def steps(before: float, after: float, at: float) -> World:
    """Prefill's and decode's load change at once, and share the budget."""
    shared = {"prefill": step(before, after, at), "decode": step(before, after, at)}
    return world(replace(CONFIG, budget=12), **shared)


def slow(start_s: float) -> World:
    """A step that replicas are slow to meet."""
    made = world(CONFIG, prefill=step(0.5, 2.0, 300))
    made.pools["prefill"].start_s = start_s
    return made


def barren() -> World:
    """Prefill never starts; decode needs what it would have taken."""
    made = world(CONFIG, prefill=step(0.5, 3.0, 300), decode=step(0.5, 2.0, 600))
    made.pools["prefill"].never_starts = True
    return made


def silent() -> World:
    """No figures of prefill any more, and its load falls."""
    made = world(CONFIG, prefill=step(2.0, 0.1, 300))
    made.pools["prefill"].reporting = lambda now, running: running if now < 310 else 0
    return made


def day(now: float) -> float:
    """Least at midnight, most at noon."""
    return 1.2 - 1.0 * math.cos(2 * math.pi * now / 86_400)


def pictures(now: float) -> float:
    """Some, none for ten minutes, some again."""
    return 0.5 if now < 60 or now > 660 else 0.0


SCENES = [
    Scene("0.7, constant", "prefill", lambda: world(CONFIG, prefill=0.69), 3900, 300),
    Scene("2.7, constant", "decode", lambda: world(CONFIG, decode=2.7), 3900, 300),
    Scene("step up, 0.5 to 3", "prefill", lambda: steps(0.5, 3, 300), 1500, 300),
    Scene("step up, 0.5 to 3", "decode", lambda: steps(0.5, 3, 300), 1500, 300),
    Scene("step down, 3 to 0.9", "prefill", lambda: steps(3, 0.9, 600), 1500, 600),
    Scene(
        "bursts of 4 s every 2 min", "prefill",
        lambda: world(CONFIG, prefill=lambda now: 1.6 if now % 120 < 4 else 0.5), 3600, 300,
    ),
    Scene(
        "bursts of 20 s every minute", "prefill",
        lambda: world(CONFIG, prefill=lambda now: 2.0 if now % 60 < 20 else 0.3), 3600, 300,
    ),
    Scene(
        "a day, 0.2 to 2.2", "prefill",
        lambda: world(CONFIG, prefill=day, decode=day), 86_400, 3600, 10.0,
    ),
    Scene(
        "prompts to answers", "decode",
        lambda: world(CONFIG, encoder=0.2, prefill=step(3.4, 0.6, 900), decode=step(0.6, 3.4, 900)),
        2400, 900,
    ),
    Scene(
        "more than the budget", "prefill",
        lambda: world(replace(CONFIG, budget=6), prefill=5.0, decode=5.0), 3900, 300,
    ),
    Scene("starts take 100 s", "prefill", lambda: slow(100.0), 2400, 300),
    Scene("prefill never starts", "decode", barren, 2400, 600),
    Scene("figures are lost", "prefill", silent, 1500, 320),
    Scene("no pictures for 10 min", "encoder", lambda: world(CONFIG, encoder=pictures), 1500, 660),
]  # fmt: skip


def row(scene: Scene) -> str:
    """One line of the table."""
    run = scene.world().run(scene.seconds, scene.dt)
    after = run.targets(scene.stage, since=scene.at)
    before = run.targets(scene.stage)[-len(after) - 1]
    calm = run.calm_after(scene.stage, CALM_S, since=scene.at)
    is_calm = run.history[-1][3][scene.stage] <= CALM_S
    cells = [
        scene.name,
        scene.stage,
        f"{before}, {max(after) if max(after) > before else min(after)}, {after[-1]}",
        str(run.changes(scene.stage, since=scene.at)),
        str(run.turns(scene.stage, since=scene.at)),
        f"{calm:.0f} s" if is_calm else "never",
        f"{run.most_devices()} of {run.config.budget}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table."""
    print(HEAD)
    for scene in SCENES:
        print(row(scene))
    return 0


if __name__ == "__main__":
    sys.exit(main())
