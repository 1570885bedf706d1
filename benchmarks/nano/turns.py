"""Turns of a taught conversation, and the same turns as a client would send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.nano.scenes import Recipe

Wire = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a user or the system says; pictures stand before the text or after it."""

    text: str
    role: str = "user"
    pictures: tuple[Recipe, ...] = ()
    text_first: bool = False


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the model should say. `learnt` is false for history whose reasoning was dropped."""

    thoughts: str
    content: str
    calls: tuple[Call, ...] = ()
    learnt: bool = True


@dataclass(frozen=True)
class Result:
    """What a tool answered to call number `index` (from 1) of the reply before."""

    index: int
    text: str


Turn = Said | Reply | Result


@dataclass(frozen=True)
class Conversation:
    """One document or one case."""

    turns: list[Turn]
    thinking: bool = True
    effort: str = "max"
    tools: list[dict[str, Any]] = field(default_factory=list)


def pictures(turns: Sequence[Turn]) -> list[Recipe]:
    """Recipes of all pictures, in the order in which the prompt meets them."""
    return [recipe for turn in turns if isinstance(turn, Said) for recipe in turn.pictures]


def recipe_part(recipe: Recipe) -> Wire:
    """A picture as the case files write it."""
    return {"type": "image", "recipe": recipe}


def to_wire(turns: Sequence[Turn], picture: Callable[[Recipe], Wire] = recipe_part) -> list[Wire]:
    """The turns as messages of the chat API; `picture` makes the content part of an image."""
    messages: list[Wire] = []
    ids: list[str] = []  # of the last reply's calls
    calls = 0
    for turn in turns:
        if isinstance(turn, Said):
            messages.append({"role": turn.role, "content": _content(turn, picture)})
        elif isinstance(turn, Result):
            message = {"role": "tool", "tool_call_id": ids[turn.index - 1], "content": turn.text}
            messages.append(message)
        else:
            message = {"role": "assistant", "content": turn.content}
            message["reasoning_content"] = turn.thoughts
            if turn.calls:
                ids = [f"{call.name}:{calls + i}" for i, call in enumerate(turn.calls)]
                calls += len(ids)
                message["tool_calls"] = [
                    {"id": i, "type": "function", "function": _function(call)}
                    for i, call in zip(ids, turn.calls, strict=True)
                ]
            messages.append(message)
    return messages


def _content(turn: Said, picture: Callable[[Recipe], Wire]) -> str | list[Wire]:
    if not turn.pictures:
        return turn.text
    text = {"type": "text", "text": turn.text}
    parts = [picture(recipe) for recipe in turn.pictures]
    return [text, *parts] if turn.text_first else [*parts, text]


def _function(call: Call) -> Wire:
    return {"name": call.name, "arguments": json.dumps(call.arguments)}
