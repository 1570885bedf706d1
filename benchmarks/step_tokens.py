"""Time a decode step of the slice at 256 rows with the choice of its tokens, as the engine does it.

    python -m benchmarks.step_tokens OUT.jsonl [slice ROWS CONTEXT | idle ROWS MICROSECONDS]

Masks begin beside the pass, a captured graph of the slice or a device that is idle for so long;
rows, sampling and what a token changes (histories, grammars) follow. For each kind three times of a
host's clock: the pass alone, the choice alone, and both together. What together is less than the
sum of the two is hidden. Logits are random, three times normal (the slice's own are flatter than
any model's), and tokens are chosen from them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.grammars import FORMS, grammar, release_sized
from benchmarks.slice import SPEC, memory, weights
from benchmarks.step import VOCAB, model_of, step_plan
from benchmarks.timing import append, machine
from common.contract.messages import Sampling
from common.errors import ServingError
from common.grammar.library import Filler, Matcher, Vocabulary
from common.sampling.history import History
from common.sampling.masks import Masks
from common.sampling.sampler import Row, sample
from router.prompt.tokenizer import Tokenizer

TIMES, IDS = 15, 500
PENALTIES = {"presence": 0.5, "frequency": 0.1, "repetition": 1.1}
KINDS = {
    "greedy": Sampling(temperature=0),
    "draw": Sampling(),
    "draw, top_p": Sampling(top_p=0.9),
    "draw, top_k": Sampling(top_k=50),
    "draw, penalties over 500 ids": Sampling(**PENALTIES),
    "greedy, 5 logprobs": Sampling(temperature=0, logprobs=5),
    "draw, grammar": Sampling(),
    "everything": Sampling(top_k=50, top_p=0.9, min_p=0.01, logprobs=5, **PENALTIES),
}
MASKED = ("draw, grammar", "everything")


class Choices:
    """A batch of choices that go on by the tokens drawn."""

    def __init__(self, sampling: Sampling, rows: int, start: Matcher | None) -> None:
        """`start` is the grammar of all of them."""
        self.sampling, self.start, self.position = sampling, start, IDS
        seen = [{(7 * i + row) % VOCAB: 1 + i % 3 for i in range(IDS)} for row in range(rows)]
        self.histories = [History(sampling, tokens=tokens) for tokens in seen]
        self.matchers = [start and start.copy() for _ in range(rows)]
        self.masks = Masks(Filler(), pinned=True)

    def step(self, logits: torch.Tensor, work: Callable[[], object]) -> None:
        """Choose and take a token each; `work` is the pass."""
        filling = self.masks.begin(self.matchers)
        work()
        rows = [
            Row(
                sampling=self.sampling,
                choice=choice,
                position=self.position,
                counts=history.counts,
                history=history,
                mask=mask,
            )
            for choice, (history, mask) in enumerate(
                zip(self.histories, filling.result(), strict=True)
            )
        ]
        for row, token in enumerate(sample(logits, rows)):
            if isinstance(token, ServingError):  # its answer was complete: another begins
                assert self.start is not None, token
                self.matchers[row] = self.start.copy()
                continue
            self.histories[row].take(token.id)
            if (matcher := self.matchers[row]) is not None:
                matcher.take(token.id)
        self.position += 1


def clock(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a call and the work it left on the device: median, half the middle half."""
    taken: list[float] = []
    for number in range(TIMES + 5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number >= 5:
            taken.append((time.perf_counter() - began) * 1e6)
    quarter = statistics.quantiles(taken, n=4)
    return round(statistics.median(taken), 1), round((quarter[2] - quarter[0]) / 2, 1)


def captured(rows: int, context: int) -> Callable[[], object]:
    """The pass of `rows` tokens behind `context` others."""
    model = model_of(weights(), "auto")
    plan = step_plan(rows, context)
    pools = memory(SPEC, rows, plan.tables.numel())
    ids = torch.randint(0, VOCAB, (rows,), device="cuda")
    if model.ops.plan_steps is not None:
        model.ops.plan_steps(plan, [context - 1] * rows, stays=True)
    model.step(ids, plan, pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step(ids, plan, pools)
    return graph.replay


def starts(folder: Path) -> Matcher:
    """A schema over a vocabulary of the release's size."""
    place = release_sized(folder)
    fields, _ = FORMS["schema"]
    wanted = grammar(Tokenizer(place / "tiktoken.model"), fields)
    return Vocabulary(place).compile(wanted)


def idle(us: int) -> Callable[[], object]:
    """A pass that only takes time."""
    cycles = 50_000_000  # tens of milliseconds: a device that was idle begins slowly
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    began.record()
    torch.cuda._sleep(cycles)
    ended.record()
    ended.synchronize()
    wanted = int(cycles * us / (began.elapsed_time(ended) * 1000))
    return lambda: torch.cuda._sleep(wanted)


def compare(path: Path, what: str, rows: int, much: int, kinds: Sequence[str]) -> None:
    """A line a kind; `much` is the context's tokens, or the idle microseconds."""
    logits = 3 * torch.randn(rows, VOCAB, device="cuda")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        started = beside.submit(starts, Path(folder))
        replay = captured(rows, much) if what == "slice" else idle(much)
        start = started.result()
    alone, spread = clock(replay)
    print(f"the pass alone {alone:,.0f} us", flush=True)
    for kind in kinds:
        choices = Choices(KINDS[kind], rows, start if kind in MASKED else None)
        choice, _ = clock(lambda c=choices: c.step(logits, lambda: None))
        both, off = clock(lambda c=choices: c.step(logits, replay))
        line: dict[str, Any] = {
            "op": "step and tokens",
            "case": {"pass": what, "batch": rows, "much": much, "kind": kind},
            "pass_us": alone,
            "choice_us": choice,
            "together_us": both,
            "spread_us": [spread, off],
            "share": round((both - alone) / both, 4),
            "hidden_us": round(alone + choice - both, 1),
        }
        append(path, line | {"machine": machine()})
        print(line, flush=True)
        choices.masks.close()


def main() -> None:
    """All kinds."""
    torch.manual_seed(0)
    what, rows, much = sys.argv[2:5] or ("slice", "256", "2048")
    compare(Path(sys.argv[1]), what, int(rows), int(much), tuple(KINDS))


if __name__ == "__main__":
    main()
