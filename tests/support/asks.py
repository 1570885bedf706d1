"""Requests that a group of ranks must answer as one rank does."""

from __future__ import annotations

import asyncio

PROMPTS = [tuple(range(20, 20 + n)) for n in (5, 64, 130)]


async def answers(line) -> list:
    """Several requests at once; one has two choices and a canary."""
    tasks = [line.task(p, max_tokens=8) for p in PROMPTS]
    tasks.append(line.task(PROMPTS[2], n=2, temperature=1.0, seed=5, canary=True))
    return list(await asyncio.gather(*map(line.run, tasks)))
