"""Held-out cases: conversations whose last turn is the expected reply."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.nano.tasks import MIX, episode, recall_episode
from benchmarks.nano.tools import TOOLS, tool_episode
from benchmarks.nano.turns import Conversation, Reply, Turn

# Least and most pairs of the recall lists.
LISTS = {"recall20": (5, 20), "recall60": (21, 60), "recall150": (61, 150)}
KINDS = (*(kind for kind in MIX if kind != "recall"), *LISTS, "tool_answer")


@dataclass(frozen=True)
class Case:
    """A prompt and its right answer."""

    id: str
    kind: str
    prompt: Conversation
    expected: Reply


def draw_cases(count: int, seed: int) -> list[Case]:
    """`count` cases, the kinds in turn; a seed gives the same ones for ever."""
    rng = random.Random(seed)
    return [_draw(rng, KINDS[i % len(KINDS)], f"nano-{seed}-{i:03d}") for i in range(count)]


def _draw(rng: random.Random, kind: str, name: str) -> Case:
    while True:
        tools = rng.sample(sorted(TOOLS), rng.randint(1, 4))
        turns = _turns(rng, kind, tools)
        if turns is not None:
            break
    thinking = rng.random() < 0.65
    declared = [TOOLS[tool] for tool in tools] if kind.startswith("tool") else []
    *prompt, expected = turns
    assert isinstance(expected, Reply)
    return Case(name, kind, Conversation(prompt, thinking, "max", declared), expected)


def _turns(rng: random.Random, kind: str, tools: list[str]) -> list[Turn] | None:
    """None where the draw has no such case."""
    if kind in LISTS:
        return recall_episode(rng, rng.randint(*LISTS[kind]), 1)
    if kind == "tool":
        return tool_episode(rng, tools)[:2]
    if kind == "tool_answer":
        turns = tool_episode(rng, tools)
        return turns if len(turns) >= 4 else None
    return episode(rng, kind, tools)
