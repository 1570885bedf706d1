"""A conversation to token ids by the server's template; what is to be learnt is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.nano.scenes import Recipe
from benchmarks.nano.turns import Conversation, Reply, Said, Turn, Wire, pictures, to_wire
from common.contract.messages import ImageRef
from router.prompt.template import Prompt, render
from router.prompt.tokenizer import Tokenizer
from router.schema.messages import Message, arrange

CELL = 28  # pixels of one image token's side


@dataclass(frozen=True)
class Document:
    """Token ids, a flag for each that the model has to produce, and the pictures' recipes.

    Rows of picture i start at `offsets[i]`.
    """

    ids: tuple[int, ...]
    learnt: tuple[bool, ...]
    recipes: tuple[Recipe, ...]
    offsets: tuple[int, ...]


def to_document(tokenizer: Tokenizer, conversation: Conversation) -> Document:
    """Render a whole conversation and mark its learnt replies."""
    prompt = to_prompt(tokenizer, conversation, generate=False)
    turns = [turn for turn in conversation.turns if isinstance(turn, Reply)]
    learnt = _mark(tokenizer, prompt.token_ids, conversation.thinking, turns)
    recipes = tuple(pictures(conversation.turns))
    return Document(prompt.token_ids, learnt, recipes, prompt.image_offsets)


def to_prompt(tokenizer: Tokenizer, conversation: Conversation, *, generate: bool = True) -> Prompt:
    """Render a conversation as the server would."""
    return render(
        tokenizer,
        _turns(conversation.turns),
        tools=conversation.tools,
        thinking=conversation.thinking,
        effort=conversation.effort,
        images=[image_ref(recipe) for recipe in pictures(conversation.turns)],
        generate=generate,
    )


def image_ref(recipe: Recipe) -> ImageRef:
    """A picture that needs no shrinking: one token for every started cell."""
    width, height = recipe["width"], recipe["height"]
    tokens = -(-width // CELL) * -(-height // CELL)
    return ImageRef(digest=b"", width=width, height=height, tokens=tokens)


def reply_ids(tokenizer: Tokenizer, reply: Reply, thinking: bool) -> tuple[int, ...]:
    """What the model has to produce after the generation prompt to say `reply`."""
    asked = Said("")  # a conversation of replies alone is refused
    whole = to_document(tokenizer, Conversation([asked, reply], thinking))
    return tuple(i for i, on in zip(whole.ids, whole.learnt, strict=True) if on)


def _turns(turns: Sequence[Turn]) -> tuple:
    def part(_: Recipe) -> Wire:
        return {"type": "image_url", "image_url": {"url": "recipe:"}}

    return arrange(msgspec.convert(to_wire(turns, part), list[Message]))


def _mark(
    tokenizer: Tokenizer, ids: Sequence[int], thinking: bool, replies: Sequence[Reply]
) -> tuple[bool, ...]:
    """Learnt is what follows a generation prompt, the end of the message included.

    Control tokens come from the template alone, so the ids of the prompt cannot occur elsewhere.
    """
    t = tokenizer
    opening = [t.open, *t.encode("message"), *t.encode(" role"), *t.encode('="')]
    opening += [*t.encode("assistant"), *t.encode('"'), t.sep]
    opening += [t.open, *t.encode("think" if thinking else "response"), t.sep]
    learnt = [False] * len(ids)
    waiting = iter(replies)
    begin = 0
    while begin < len(ids):
        end = ids.index(t.end_of_msg, begin) + 1
        start = begin + len(opening)
        if list(ids[begin:start]) == opening and next(waiting).learnt:
            learnt[start:end] = [True] * (end - start)
        begin = end
    return tuple(learnt)
