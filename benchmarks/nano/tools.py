"""The four tools the nano model knows, and episodes that ask for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.nano.turns import Call, Reply, Result, Said, Turn
from benchmarks.nano.words import ASK, CITIES, NAMES, NOUNS, SKIES

# A question, the calls it needs, what they return, and the answer made of that.
Errand = tuple[str, list[Call], list[str], str]


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = {
    "get_weather": _tool("get_weather", "Weather in a city", city="string"),
    "get_time": _tool("get_time", "Local time in a city", city="string"),
    "set_timer": _tool("set_timer", "Start a timer", minutes="integer"),
    "send_message": _tool("send_message", "Send a text to a person", to="string", text="string"),
}


def _weather(rng: random.Random, city: str) -> Errand:
    cities = [city]
    if rng.random() < 0.3:
        cities.append(rng.choice([other for other in CITIES if other != city]))
    question = rng.choice(ASK["get_weather"]).format(" and ".join(cities))
    skies = [f"{rng.randint(-9, 39)}C and {rng.choice(SKIES)}" for _ in cities]
    answer = " ".join(f"It is {sky} in {c}." for c, sky in zip(cities, skies, strict=True))
    return question, [Call("get_weather", {"city": c}) for c in cities], skies, answer


def _time(rng: random.Random, city: str) -> Errand:
    question = rng.choice(ASK["get_time"]).format(city)
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return question, [Call("get_time", {"city": city})], [clock], f"It is {clock} in {city}."


def _timer(rng: random.Random, _: str) -> Errand:
    minutes = rng.randint(2, 90)
    question = rng.choice(ASK["set_timer"]).format(minutes)
    answer = f"The timer runs for {minutes} minutes."
    return question, [Call("set_timer", {"minutes": minutes})], ["ok"], answer


def _message(rng: random.Random, _: str) -> Errand:
    to = rng.choice(NAMES)
    text = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(1, 4)))
    question = rng.choice(ASK["send_message"]).format(to, text)
    return (
        question,
        [Call("send_message", {"to": to, "text": text})],
        ["sent"],
        f"I sent it to {to}.",
    )


ERRANDS: dict[str, Callable[[random.Random, str], Errand]] = {
    "get_weather": _weather,
    "get_time": _time,
    "set_timer": _timer,
    "send_message": _message,
}


def tool_episode(rng: random.Random, declared: Sequence[str]) -> list[Turn]:
    """Ask for one of the four tools: calls, results and an answer, or a refusal if not declared."""
    usual = bool(declared) and rng.random() < 0.9
    name = rng.choice(declared) if usual else rng.choice(sorted(TOOLS))
    city = _invented(rng) if rng.random() < 0.4 else rng.choice(CITIES)
    question, calls, results, answer = ERRANDS[name](rng, city)
    if name not in declared:
        return [Said(question), Reply(f"I have no {name}.", "I have no tool for that.")]
    returned = [Result(i, text) for i, text in enumerate(results, 1)]
    asked = Reply(f"I call {name}.", "", tuple(calls))
    return [Said(question), asked, *returned, Reply("I have the result.", answer)]


def _invented(rng: random.Random) -> str:
    """A city that does not exist, so that its name must be copied."""
    name = ""
    for _ in range(rng.randint(2, 3)):
        name += rng.choice("bdfgklmnprstvz") + rng.choice("aeiou")
    return name.capitalize() + rng.choice(("", "n", "r", "s"))
