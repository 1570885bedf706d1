"""What a checkpoint answers: `python -m benchmarks.nano.evaluate DIR OPEN.jsonl HELD.jsonl`.

One plain loop over the serving model (whole prompt, then steps), greedy, without scheduler, pool or
transfer: the record that a serving system is held against. OPEN gets 120 cases and HELD 80 others;
a table of right answers by kind is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.nano import scenes
from benchmarks.nano.cases import KINDS, Case, draw_cases
from benchmarks.nano.documents import to_prompt
from benchmarks.nano.packing import to_patches
from benchmarks.nano.turns import pictures, to_wire
from common.config.checkpoint import load_spec
from common.config.spec import CHUNK
from common.model.batch import Memory, Share, StepBatch
from common.model.text import TextModel
from common.weights import load_text, load_vision
from router.prompt.template import Prompt
from router.prompt.tokenizer import load_tokenizer
from router.prompt.tools import CallArguments, CallStart, Content, ReplyParser
from services.encoder.moonvit import MoonVit

LONGEST = 160  # tokens of a reply
DETAILED, TOP_TOKENS, TOP = 20, 8, 5  # records with a reference; its first tokens; best of each
SEED, HELD_APART = 20001, 50021
BATCH = 16


@dataclass
class Answer:
    """A greedy reply. `margin` is the least lead, in logits, of a chosen token over the next."""

    ids: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # log-probabilities
    margin: float = math.inf

    def add(self, logits: Tensor) -> int:
        """Choose the next token from one row of logits."""
        if len(self.ids) < TOP_TOKENS:
            best = logits.log_softmax(-1).topk(TOP)
            self.top.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        first, second = logits.topk(2).values.tolist()
        self.margin = min(self.margin, first - second)
        self.ids.append(int(logits.argmax()))
        return self.ids[-1]


class Loop:
    """A checkpoint, and the plain loop over it."""

    def __init__(self, directory: Path) -> None:
        self.spec = load_spec(directory)
        self.tokenizer = load_tokenizer(directory)
        assert self.spec.vision is not None
        text = load_text(directory, self.spec, dtype=torch.float32)
        vision = load_vision(directory, self.spec, dtype=torch.float32)
        self._text = TextModel(self.spec.text, text)
        self._vision = MoonVit(self.spec.vision, vision)

    def answer(self, cases: Sequence[Case]) -> list[Answer]:
        """Greedy replies, up to the end of the message."""
        answers: list[Answer] = []
        for at in range(0, len(cases), BATCH):
            answers += self._together(cases[at : at + BATCH])
        return answers

    def _together(self, cases: Sequence[Case]) -> list[Answer]:
        prompts = [to_prompt(self.tokenizer, case.prompt) for case in cases]
        sizes = [-(-(len(p.token_ids) + LONGEST) // CHUNK) for p in prompts]
        memory = self._memory(len(cases), sum(sizes))
        answers = [Answer() for _ in cases]
        pages = []
        for slot, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
            first = sum(sizes[:slot])
            pages.append(tuple(range(first, first + sizes[slot])))
            share = self._prompt_share(case, prompt, slot, pages[slot])
            answers[slot].add(self._pass("chunks", [share], memory)[0])
        alive = self._alive(answers, range(len(cases)))
        while alive:
            shares = [
                Share(
                    slot=slot,
                    pages=pages[slot],
                    start=len(prompts[slot].token_ids) + len(answers[slot].ids) - 1,
                    token_ids=(answers[slot].ids[-1],),
                )
                for slot in alive
            ]
            for slot, logits in zip(alive, self._pass("steps", shares, memory), strict=True):
                answers[slot].add(logits)
            alive = self._alive(answers, alive)
        return answers

    def _alive(self, answers: Sequence[Answer], slots: Sequence[int]) -> list[int]:
        end = self.tokenizer.end_of_msg
        return [s for s in slots if answers[s].ids[-1] != end and len(answers[s].ids) < LONGEST]

    def _pass(self, kind: str, shares: Sequence[Share], memory: Memory) -> Tensor:
        return self._text.forward(StepBatch(kind=kind, shares=tuple(shares)), memory)

    def _prompt_share(self, case: Case, prompt: Prompt, slot: int, pages: tuple[int, ...]) -> Share:
        images = []
        for recipe in pictures(case.prompt.turns):
            patches, grid = to_patches(scenes.pixels(recipe))
            images.append((torch.from_numpy(patches).unflatten(1, (3, 14, 14)), grid))
        embeds = torch.cat(self._vision.forward(images)) if images else None
        at = [
            offset + i
            for offset, image in zip(prompt.image_offsets, prompt.images, strict=True)
            for i in range(image.tokens)
        ]
        return Share(
            slot=slot,
            pages=pages,
            start=0,
            token_ids=prompt.token_ids,
            embeds=embeds,
            embed_at=tuple(at),
        )

    def _memory(self, slots: int, pages: int) -> Memory:
        text = self.spec.text
        kda, mla = text.kda, text.mla
        head = (slots, len(text.kda_layers), kda.num_heads)
        return Memory(
            state=torch.zeros(*head, kda.head_dim, kda.head_dim),
            conv=torch.zeros(*head, kda.conv_taps - 1, 3, kda.head_dim),
            latent=torch.zeros(pages, len(text.mla_layers), CHUNK, mla.latent_width),
        )

    def is_right(self, case: Case, ids: Sequence[int]) -> bool:
        """Whether a reply's text and calls are the expected ones, and its message was ended."""
        parser = ReplyParser(self.tokenizer, thinking=case.prompt.thinking, delivers_tools=True)
        content, calls = "", []
        for event in [*parser.feed(ids), *parser.finish()]:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallStart):
                calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                calls[event.index][1] += event.text
        try:
            found = [(name, json.loads(arguments)) for name, arguments in calls]
        except ValueError:
            return False
        wanted = [(call.name, call.arguments) for call in case.expected.calls]
        ended = ids[-1] == self.tokenizer.end_of_msg
        return ended and content == case.expected.content and found == wanted


def to_record(case: Case, answer: Answer, loop: Loop, *, detailed: bool) -> dict[str, Any]:
    """A case with the checkpoint's answer, as the files keep it."""
    prompt = to_prompt(loop.tokenizer, case.prompt)
    expected: dict[str, Any] = {
        "content": case.expected.content,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments} for call in case.expected.calls
        ],
    }
    if case.prompt.thinking:
        expected["reasoning"] = case.expected.thoughts
    record: dict[str, Any] = {
        "id": case.id,
        "kind": case.kind,
        "thinking": case.prompt.thinking,
        "effort": case.prompt.effort,
        "messages": to_wire(case.prompt.turns),
        "image_sha256": [
            hashlib.sha256(scenes.pixels(recipe).tobytes()).hexdigest()
            for recipe in pictures(case.prompt.turns)
        ],
        "expected": expected,
        "prompt_tokens": len(prompt.token_ids),
        "correct": loop.is_right(case, answer.ids),
        "margin": round(answer.margin, 4),
    }
    if case.prompt.tools:
        record["tools"] = case.prompt.tools
    if detailed:
        best = [[[token, round(value, 5)] for token, value in step] for step in answer.top]
        ids = list(prompt.token_ids)
        record["reference"] = {"prompt_ids": ids, "ids": answer.ids, "top5": best}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("open", type=Path, help="120 cases, to be published")
    parser.add_argument("held", type=Path, help="80 others, to be held back")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    loop = Loop(options.checkpoint)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for path, count, seed in (
        (options.open, 120, options.seed),
        (options.held, 80, options.seed + HELD_APART),
    ):
        cases = draw_cases(count, seed)
        answers = zip(cases, loop.answer(cases), strict=True)
        records = [
            to_record(case, answer, loop, detailed=i < DETAILED)
            for i, (case, answer) in enumerate(answers)
        ]
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        asked.update(record["kind"] for record in records)
        right.update(record["kind"] for record in records if record["correct"])
    for kind in KINDS:
        print(f"| {kind} | {right[kind]} of {asked[kind]} |")
    print(f"| **all** | **{right.total()} of {asked.total()}** |")


if __name__ == "__main__":
    main()
