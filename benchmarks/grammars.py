"""What a form costs on a CPU: `OMP_NUM_THREADS=1 python -m benchmarks.grammars`.

Reading a vocabulary, compiling, one mask, one step of the position, and sampling a row with a mask.
In place of the release's vocabulary stands one of its size, made of nano's pieces.
"""

from __future__ import annotations

import base64
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import ROOT, Timing, measure, record, summary
from common.config.vocabulary import SLOTS, read_ranks
from common.contract.grammar import Grammar
from common.contract.messages import Sampling
from common.grammar.library import Vocabulary
from common.sampling.sampler import Row, sample
from router.prompt.form import form_of
from router.prompt.tokenizer import Tokenizer
from router.schema import RequestLimits, parse_chat

RELEASE_PIECES = 163_584
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "grün"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "store", "parameters": PERSON}}
SUMS = 'root ::= term ([+*-] term)*\nterm ::= [0-9]+ | "(" root ")"'
TAGS = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
CALL = (
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="store" index="1"<|sep|>'
    + TAGS.format("name", "string", "Ada Lovelace of London")
    + TAGS.format("age", "number", "36")
    + TAGS.format("tags", "array", '["red", "green"]')
    + "<|close|>call<|sep|><|close|>tools<|sep|>"
)
FORMS = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
        '{"name": "Ada Lovelace of London", "age": 36, "tags": ["red", "green"]}<|close|>',
    ),
    "any object": (
        {"response_format": {"type": "json_object"}},
        '{"a": [1, 2.5, {"b": null}], "text": "It was a bright cold day in April"}<|close|>',
    ),
    "required call": ({"tools": [TOOL], "tool_choice": "required"}, CALL),
    "recursive grammar": ({"structured_outputs": {"grammar": SUMS}}, "(12+3)*(4-5)<|close|>"),
}


def release_sized(folder: Path) -> Path:
    """A folder with a `tiktoken.model` of the release's size."""
    ranks = read_ranks(ROOT / "checkpoints/nano/tiktoken.model")
    pieces = dict.fromkeys(sorted(ranks, key=lambda piece: ranks[piece]))
    words = [piece for piece in pieces if len(piece) > 1]
    for size in (2, 3):
        for parts in itertools.product(words[:: 2 * size], repeat=size):
            if len(pieces) == RELEASE_PIECES:
                break
            pieces.setdefault(b"".join(parts))
    lines = (f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(pieces))
    (folder / "tiktoken.model").write_text("".join(lines))
    return folder


def grammar(tokenizer: Tokenizer, fields: dict) -> Grammar:
    limits = RequestLimits(
        models=frozenset({"m"}), vocab=tokenizer.vocab, context=4096, eos=tokenizer.end_of_msg
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    body["reasoning_effort"] = "none"
    request = parse_chat(json.dumps(body).encode(), limits)
    return form_of(tokenizer, request, source_bytes=1 << 20).grammar


def steps(vocabulary: Vocabulary, wanted: Grammar, ids: list[int]) -> Timing:
    """Mask and step along a reply; the spread is over its tokens, the first pass is not counted."""
    seconds: list[float] = []
    for _ in range(2):
        seconds.clear()
        matcher = vocabulary.compile(wanted)
        for token in ids:
            began = time.perf_counter()
            matcher.mask()
            seconds.append(time.perf_counter() - began)
            matcher.take(token)
            assert not matcher.why_lost, matcher.why_lost
    return summary(seconds)


def report(name: str, kind: str, timing: Timing) -> None:
    record("grammars", {"vocabulary": name, "kind": kind}, timing)
    print(f"{name:8} {kind:32} {timing.p50 * 1e6:10.1f} us, p95 {timing.p95 * 1e6:10.1f} us")


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        places = {"nano": ROOT / "checkpoints/nano", "release": release_sized(Path(folder))}
        for name, place in places.items():
            report(name, "vocabulary", measure(lambda p=place: Vocabulary(p), warm=0, runs=3))
            vocabulary = Vocabulary(place)
            tokenizer = Tokenizer(place / "tiktoken.model")
            assert vocabulary.size == tokenizer.base + SLOTS
            for kind, (fields, reply) in FORMS.items():
                wanted = grammar(tokenizer, fields)
                ids = tokenizer.encode_marked(reply)
                report(
                    name,
                    f"{kind}: compile",
                    measure(lambda v=vocabulary, w=wanted: v.compile(w)),
                )
                report(name, f"{kind}: mask", steps(vocabulary, wanted, ids))
            logits, mask = torch.randn(1, vocabulary.size), vocabulary.compile(wanted).mask()
            for kind, row in (
                ("draw", Row(sampling=Sampling())),
                ("draw with a mask", Row(sampling=Sampling(), mask=mask)),
            ):
                report(name, kind, measure(lambda x=logits, r=row: sample(x, [r])))


if __name__ == "__main__":
    main()
