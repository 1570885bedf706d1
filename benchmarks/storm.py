"""What a storm of cancels leaves behind: `OMP_NUM_THREADS=1 python -m benchmarks.storm`.

Requests a few at a time through real rooms for a while; then 200 that are cancelled in a second;
then the same requests again. Says how soon nothing was held, and how the rate changed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time

import torch

from benchmarks.harness import ROOT, record, summary
from common.config.settings import Settings
from tests.support.prompts import image, question
from tests.support.relay import Relay, changed, in_process

AT_ONCE, STORM, TOKENS = 4, 200, 20
KINDS = ({}, {"n": 2}, {"images": [image()], "offsets": [40]}, {"canary": True})


async def steady(relay: Relay, seconds: float) -> list[float]:
    """Seconds of each request while `AT_ONCE` are asked at a time."""
    until, took, numbers = time.monotonic() + seconds, [], itertools.count()

    async def ask_on() -> None:
        while time.monotonic() < until:
            at, began = next(numbers), time.monotonic()
            await relay.run(
                relay.task(question(at % 16), max_tokens=TOKENS, **KINDS[at % len(KINDS)])
            )
            took.append(time.monotonic() - began)

    await asyncio.gather(*[ask_on() for _ in range(AT_ONCE)])
    return took


async def storm(relay: Relay) -> float:
    """Cancel `STORM` requests in about a second; seconds until no room held anything."""
    running = [
        asyncio.ensure_future(
            relay.run(relay.task(question(at), max_tokens=60, **KINDS[at % len(KINDS)]))
        )
        for at in range(STORM)
    ]
    for one in running:
        await asyncio.sleep(1.0 / STORM)
        one.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*running, return_exceptions=True)
    began = time.monotonic()
    await relay.nothing_left()
    return time.monotonic() - began


async def run(seconds: float) -> None:
    settings = changed(Settings(), model={"path": str(ROOT / "checkpoints/nano")})
    async with in_process(settings, encoder=1) as relay:
        await steady(relay, min(5.0, seconds))
        before = await steady(relay, seconds)
        empty_s = await storm(relay)
        after = await steady(relay, seconds)
    for when, took in (("before", before), ("after", after)):
        record("storm", {"when": when, "seconds": seconds, "requests": len(took)}, summary(took))
    change = 100 * (len(after) / len(before) - 1)
    print(
        f"{len(before)} requests in {seconds:g} s before, {len(after)} after ({change:+.1f} %); "
        f"nothing was held {empty_s:.3f} s after the last of {STORM} cancels"
    )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    asyncio.run(run(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
