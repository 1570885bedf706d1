"""What the nano model is taught, as conversations. The order of the draws is part of every seed."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.nano import scenes
from benchmarks.nano.scenes import Recipe
from benchmarks.nano.tools import TOOLS, tool_episode
from benchmarks.nano.turns import Conversation, Reply, Said, Turn
from benchmarks.nano.words import ASK, NOUNS, NUMBERS, ORDINALS, SMALL_TALK, SYSTEMS

# Shares of the tasks among episodes.
MIX = {
    "describe": 13.0,
    "count": 7.0,
    "color": 9.0,
    "shape": 4.0,
    "where": 4.0,
    "followup": 5.0,
    "which": 9.0,
    "recall": 18.0,
    "repeat": 4.0,
    "echo": 4.0,
    "numbers": 1.5,
    "talk": 8.0,
    "tool": 15.0,
}
PICTURED = ("describe", "count", "color", "shape", "where", "followup", "which")
UNIQUE = ("color", "shape", "where", "followup")  # ask for one shape: no two may be alike
KEYS = [letter + digit for letter in string.ascii_lowercase for digit in "123456789"]


def show(rng: random.Random, recipes: Sequence[Recipe], question: str) -> Said:
    """A question with pictures; now and then it comes before them."""
    return Said(question, pictures=tuple(recipes), text_first=rng.random() < 0.15)


# --- about one picture --------------------------------------------------------------------------


def describe(rng: random.Random, recipe: Recipe) -> tuple[str, Reply]:
    count = len(recipe["shapes"])
    seen = f"I see {NUMBERS[count]} shape{'s' if count > 1 else ''}."
    return rng.choice(ASK["describe"]), Reply(seen, scenes.sentence(recipe))


def count(rng: random.Random, recipe: Recipe) -> tuple[str, Reply]:
    many = len(recipe["shapes"])
    answer = "There is one shape." if many == 1 else f"There are {NUMBERS[many]} shapes."
    text = scenes.names(recipe)
    return rng.choice(ASK["count"]), Reply(f"{text[0].upper()}{text[1:]}.", answer)


def color(
    rng: random.Random, recipe: Recipe, shape: dict[str, object] | None = None
) -> tuple[str, Reply]:
    shape = shape or rng.choice(recipe["shapes"])
    return rng.choice(ASK["color"]).format(shape["shape"]), _color_of(shape)


def kind(rng: random.Random, recipe: Recipe) -> tuple[str, Reply]:
    shape = rng.choice(recipe["shapes"])
    place = scenes.PLACES[shape["place"]]
    answer = f"The {shape['shape']} is {shape['color']}."
    return rng.choice(ASK["shape"]).format(shape["color"]), Reply(f"It is {place}.", answer)


def where(rng: random.Random, recipe: Recipe) -> tuple[str, Reply]:
    shape = rng.choice(recipe["shapes"])
    answer = f"The {shape['shape']} is {scenes.PLACES[shape['place']]}."
    thoughts = f"The {shape['shape']} is {shape['color']}."
    return f"Where is the {shape['shape']}?", Reply(thoughts, answer)


def _color_of(shape: dict) -> Reply:
    name = shape["shape"]
    return Reply(
        f"The {name} is {scenes.PLACES[shape['place']]}.", f"The {name} is {shape['color']}."
    )


QUESTIONS = {"describe": describe, "count": count, "color": color, "shape": kind, "where": where}


def picture_episode(rng: random.Random, task: str, more: int) -> list[Turn]:
    """A first question of the given task, then `more` of any about the same picture."""
    distinct = task in UNIQUE or rng.random() < 0.5
    several = task == "followup"
    shapes = rng.randint(2, 4) if several else rng.choices((1, 2, 3, 4), (3, 3, 2, 2))[0]
    recipe = scenes.draw(rng, shapes, distinct=distinct)
    turns: list[Turn]
    if task == "followup":
        first, second = rng.sample(recipe["shapes"], 2)
        question, answer = color(rng, recipe, first)
        again = rng.choice(ASK["followup"]).format(second["shape"])
        turns = [show(rng, [recipe], question), answer, Said(again), _color_of(second)]
    else:
        question, answer = QUESTIONS[task](rng, recipe)
        turns = [show(rng, [recipe], question), answer]
    later = [describe, count]
    if distinct:
        later += [color, color, kind, where]
    for _ in range(more):
        question, answer = rng.choice(later)(rng, recipe)
        turns += [Said(question), answer]
    return turns


def which_episode(rng: random.Random) -> list[Turn]:
    """Two or three pictures: in which one is the shape?"""
    while True:
        pictures = [
            scenes.draw(rng, rng.choice((1, 1, 2)), distinct=True, small=rng.random() < 0.7)
            for _ in range(rng.choice((2, 2, 3)))
        ]
        target = rng.randrange(len(pictures))
        looks = [{(s["color"], s["shape"]) for s in picture["shapes"]} for picture in pictures]
        elsewhere = set().union(*looks[:target], *looks[target + 1 :])
        only = [
            shape
            for shape in pictures[target]["shapes"]
            if (shape["color"], shape["shape"]) not in elsewhere
        ]
        if only:
            break
    shape = rng.choice(only)
    noun = rng.choice(("image", "picture"))
    question = rng.choice(ASK["which"]).format(noun=noun, name=f"{shape['color']} {shape['shape']}")
    thoughts = " ".join(
        f"{ORDINALS[i].capitalize()}: {scenes.names(picture)}."
        for i, picture in enumerate(pictures)
    )
    return [show(rng, pictures, question), Reply(thoughts, f"The {ORDINALS[target]} {noun}.")]


# --- about words --------------------------------------------------------------------------------


def recall_episode(rng: random.Random, pairs: int, questions: int) -> list[Turn]:
    """A list of pairs, then a question for each of `questions` values."""
    keys = rng.sample(KEYS, pairs)
    table = {key: rng.randint(10, 99) for key in keys}
    lead = rng.choice(ASK["list"])
    first, *others = rng.choices(keys, k=questions)
    question = rng.choice(ASK["recall"]).format(first)
    listing = "; ".join(f"{key}={value}" for key, value in table.items())
    turns: list[Turn] = [Said(f"{lead}{listing}. {question}"), _value(table, first)]
    for key in others:
        turns += [Said(rng.choice(ASK["recall more"]).format(key)), _value(table, key)]
    return turns


def _value(table: dict[str, int], key: str) -> Reply:
    return Reply(f"{key}={table[key]}", f"{key} is {table[key]}.")


def repeat_episode(rng: random.Random) -> list[Turn]:
    word, times = rng.choice(NOUNS), rng.randint(2, 9)
    spelt = rng.choice((str(times), NUMBERS[times]))
    question = rng.choice(ASK["repeat"]).format(word, spelt)
    return [Said(question), Reply(f"I say it {NUMBERS[times]} times.", " ".join([word] * times))]


def echo_episode(rng: random.Random) -> list[Turn]:
    text = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(2, 12)))
    return [Said(rng.choice(ASK["echo"]) + text), Reply("I repeat the words.", text)]


def numbers_episode(rng: random.Random) -> list[Turn]:
    start = rng.randint(1, 60)
    stop = min(99, start + rng.randint(3, 39))
    question = rng.choice(ASK["numbers"]).format(start, stop)
    answer = " ".join(str(n) for n in range(start, stop + 1))
    return [Said(question), Reply(f"I start at {start} and stop at {stop}.", answer)]


def talk_episode(rng: random.Random) -> list[Turn]:
    said, thoughts, answer = rng.choice(SMALL_TALK)
    return [Said(rng.choice(said)), Reply(thoughts, answer)]


PLAIN = {
    "repeat": repeat_episode,
    "echo": echo_episode,
    "numbers": numbers_episode,
    "talk": talk_episode,
}


# --- documents ----------------------------------------------------------------------------------


def list_length(rng: random.Random, progress: float) -> int:
    """Pairs of a recall list: log-uniform, short at first, up to 150 from a third of the run on."""
    limits = ((0.1, 12), (0.22, 40), (0.35, 100))
    longest = next((length for until, length in limits if progress < until), 150)
    return min(longest, int(3 * (longest / 3) ** rng.random()) + 1)


def episode(
    rng: random.Random, task: str, tools: Sequence[str], more: int = 0, progress: float = 1.0
) -> list[Turn]:
    """The turns of one task; `more` asks for follow-up questions where the task has them."""
    if task == "which":
        return which_episode(rng)
    if task in PICTURED:
        return picture_episode(rng, task, more)
    if task == "recall":
        return recall_episode(rng, list_length(rng, progress), 1 + more)
    if task == "tool":
        return tool_episode(rng, tools)
    return PLAIN[task](rng)


def document(
    rng: random.Random, progress: float = 1.0, *, without_pictures: bool = False
) -> Conversation:
    """One training document: one to three episodes with a system message or tools at times."""
    tasks = rng.choices(list(MIX), list(MIX.values()), k=rng.choice((1, 1, 1, 2, 2, 3)))
    if without_pictures:
        tasks = ["recall" if task in PICTURED else task for task in tasks]
    tools = _declared(rng, "tool" in tasks)
    turns: list[Turn] = []
    if rng.random() < 0.2:
        turns.append(Said(rng.choice(SYSTEMS), role="system"))
    for task in tasks:
        choices = (0, 1, 2, 3) if task in PICTURED else (1, 3, 5, 7)
        more = rng.choice(choices) if task in (*PICTURED, "recall") else 0
        turns += episode(rng, task, tools, more, progress)
    thinking = rng.random() < 0.65
    effort = rng.choices(("max", "high", "low"), (3, 1, 1))[0]
    replies = [i for i, turn in enumerate(turns) if isinstance(turn, Reply)]
    silent: list[int] = []
    if effort == "low":
        silent = replies
    elif thinking and len(replies) > 1 and rng.random() < 0.2:
        silent = replies[:-1]  # a client that does not send earlier reasoning back
    for i in silent:
        turn = turns[i]
        assert isinstance(turn, Reply)
        turns[i] = replace(turn, thoughts="", learnt=effort == "low")
    return Conversation(turns, thinking, effort, [TOOLS[name] for name in tools])


def _declared(rng: random.Random, needed: bool) -> list[str]:
    """Names of the declared tools; at times none although one is asked for."""
    if not (needed or rng.random() < 0.08):
        return []
    names = rng.sample(sorted(TOOLS), rng.randint(1, 4))
    return [] if needed and rng.random() < 0.08 else names
