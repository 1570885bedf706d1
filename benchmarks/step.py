"""Time whole passes over a slice of the release: four layers of true width, random weights, one
GPU.

    python -m benchmarks.step OUT.jsonl [PART ...]

PART is `decode`, `exact`, `prefill` or `graphs`; all by default. Decode runs as one captured CUDA
graph; before a time is kept, its logits are compared with those of the same pass run eagerly.
Layers: KDA with the dense network, KDA and KDA and MLA with 896 experts. The floor adds up what a
step must read and write: weights (of the experts, those chosen), states, latents. `exact` times the
same steps in fixed tiles. `graphs` captures every bucket of a decode room, as the room does, and
says what the device has less of after each, beside what the memory plan keeps for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops import COPY, MATRIX
from benchmarks.slice import BF16, SPEC, memory, weights
from benchmarks.timing import append, machine, measure
from common.config.settings import DecodeSettings
from common.model.batch import Share, StepBatch
from common.model.text import TextModel
from common.ops.plan import Steps
from common.ops.select import choose, printed
from common.runtime.graphs import GraphedModel, buckets, graph_bytes, width_of
from common.runtime.loaded import fitted
from common.runtime.recorder import Call, Cuda, Recorder
from common.weights.tree import TextWeights

HIDDEN, LATENT, WIDTH, EXPERTS, VOCAB = 7168, 3584, 3072, 896, 163840
CASES = (
    (1, 1024),
    (8, 8192),
    (32, 8192),
    (64, 8192),
    (128, 4096),
    (1, 131072),
    (8, 131072),
    (32, 1024),
)
PRICED = ((1, 8192), (8, 8192), (32, 8192), (64, 8192))
GRAPHED = (32, 64, 128)  # rows of the largest step
PAGES = 8192  # of a decode room


def floor_us(batch: int, context: int) -> float:
    """Bytes a decode step of the slice must move, at the copy rate."""
    kda = 2 * (HIDDEN * (4 * 12288 + 224) + 12288 * 128 + HIDDEN * 12288)
    mla = 2 * (HIDDEN * (1536 + 576 + 12288) + 18432 * 1536 + 96 * 256 * 512 + HIDDEN * 12288)
    front = 4 * EXPERTS * HIDDEN + 2 * (2 * LATENT * HIDDEN + 3 * 6144 * HIDDEN)
    used = EXPERTS * (1 - (1 - 16 / EXPERTS) ** batch)
    routed = used * 3 * WIDTH * LATENT * (0.5 + 1 / 32)
    fixed = 3 * kda + mla + 3 * front + 2 * 3 * 33792 * HIDDEN + 2 * VOCAB * HIDDEN
    each = 3 * 96 * (2 * 128 * 128 * 4 + 2 * 9 * 128 * 2) + context * 1152
    return (fixed + 3 * routed + batch * each) / COPY


def step_plan(batch: int, context: int) -> Steps:
    """A batch whose shares have `context` tokens with this one."""
    pages = -(-context // 64) + 1
    return Steps(
        slots=torch.arange(batch, device="cuda"),
        starts=torch.full((batch,), context - 1, device="cuda"),
        tables=torch.randperm(batch * pages, device="cuda").view(batch, pages),
    )


def decode(model: TextModel, path: Path, who: str, batch: int, context: int) -> None:
    """One decode step, captured."""
    plan = step_plan(batch, context)
    pools = memory(SPEC, batch, plan.tables.numel())
    ids = torch.randint(0, VOCAB, (batch,), device="cuda")
    case: dict[str, Any] = {"what": "decode", "batch": batch, "context": context}
    if model.ops.plan_steps is not None:
        model.ops.plan_steps(plan, [context - 1] * batch, stays=True)
    eager = model.step(ids, plan, pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = model.step(ids, plan, pools)
    pools.state.zero_()
    pools.conv.zero_()
    graph.replay()
    case["graph_equals_eager"] = bool(torch.equal(eager, replayed))
    case["finite"] = bool(eager.isfinite().all())
    timing = measure([graph.replay], graph=False)
    keep(path, case, who, timing.us, timing.spread, floor_us(batch, context))


def prefill(model: TextModel, path: Path, who: str, tokens: int) -> None:
    """One pass over a prompt."""
    pools = memory(SPEC, 1, tokens // 64, full=False)
    ids = tuple(torch.randint(0, VOCAB, (tokens,)).tolist())
    share = Share(slot=0, pages=tuple(range(tokens // 64)), start=0, token_ids=ids)
    batch = StepBatch(kind="chunks", shares=(share,))
    timing = measure([lambda: model.forward(batch, pools)], replays=5, graph=False)
    keep(
        path,
        {"what": "prefill", "tokens": tokens},
        who,
        timing.us,
        timing.spread,
        prefill_us(tokens),
    )


def prefill_us(tokens: int) -> float:
    """Flops of a prompt at the matrix rate."""
    kda = HIDDEN * (4 * 12288 + 224 + 12288) + 12288 * 128
    mla = HIDDEN * (1536 + 576 + 2 * 12288) + 18432 * 1536 + 96 * 256 * 512 + 96 * 320 * tokens / 2
    front = EXPERTS * HIDDEN + 2 * LATENT * HIDDEN + 3 * 6144 * HIDDEN + 16 * 3 * WIDTH * LATENT
    return 2.0 * tokens * (3 * kda + mla + 3 * front + 3 * 33792 * HIDDEN) / MATRIX


class Weighed:
    """A recorder that looks after every capture at what the device has left."""

    def __init__(self, recorder: Recorder, left: Callable[[], tuple[int, int]]) -> None:
        """`left()`: bytes that the device has free, and bytes that torch holds of it."""
        self._recorder, self._left = recorder, left
        self.seen = [left()]

    def record(self, work: Call) -> Call:
        replay = self._recorder.record(work)
        self.seen.append(self._left())
        return replay

    def taken(self) -> list[tuple[int, int]]:
        """Of each capture in turn: bytes the device has less, and of them those that torch has."""
        return [(a[0] - b[0], b[1] - a[1]) for a, b in pairwise(self.seen)]


def left() -> tuple[int, int]:
    """See `Weighed`; what torch keeps for nobody is given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()


def graphs(model: TextModel, path: Path, who: str, most: int) -> None:
    """What a decode room's captured steps take, by bucket and in all, against the plan for them."""
    decode = DecodeSettings(slots=most, pages=PAGES, max_batch=most)
    pools = memory(SPEC, most, PAGES, full=False)
    began = left()
    weighed = Weighed(Cuda(), left)
    made = GraphedModel(model, pools, most=most, width=width_of(SPEC, PAGES), recorder=weighed)
    ended = left()
    sizes = tuple(reversed(buckets(most)))
    by_bucket = dict(zip(sizes, weighed.taken(), strict=True))
    line = {
        "op": "graph memory",
        "case": {"most": most, "pages": PAGES, "layers": SPEC.num_layers},
        "who": who,
        "taken_mib": mib(began[0] - ended[0]),
        "torch_mib": mib(ended[1] - began[1]),
        "planned_mib": mib(graph_bytes(SPEC, "bfloat16", decode)),
        "by_bucket_mib": {size: [mib(n) for n in taken] for size, taken in by_bucket.items()},
    }
    append(path, line | {"machine": machine()})
    print(line, flush=True)
    del made, pools
    left()


def mib(count: int) -> float:
    return round(count / 2**20, 2)


def keep(
    path: Path, case: dict[str, Any], who: str, us: float, spread: float, floor: float
) -> None:
    """Write one line and print it."""
    line = {"op": "slice", "case": case, "who": who, "us": round(us, 1)}
    line |= {
        "spread_us": round(spread, 1),
        "floor_us": round(floor, 1),
        "of_floor": round(floor / us, 3),
    }
    append(path, line | {"machine": machine()})
    print(line, flush=True)


def model_of(held: TextWeights, wanted: str, *, exact: bool = False) -> TextModel:
    """The slice with the bodies of a setting."""
    device = torch.device("cuda")
    ops, table = choose(wanted, SPEC, quantization="mxfp4", dtype=BF16, device=device, exact=exact)
    print(printed(table))
    return TextModel(SPEC, fitted(held, ops), ops=ops, exact=exact)


def main() -> None:
    """Decode over batches and contexts, its price in fixed tiles, then a prompt."""
    torch.manual_seed(0)
    path, parts = Path(sys.argv[1]), sys.argv[2:] or ["decode", "exact", "prefill", "graphs"]
    held = weights()
    model = model_of(held, "auto")
    who = "body" if model.ops.plan_steps is None else "body, flashinfer"
    if "decode" in parts:
        for batch, context in CASES:
            decode(model, path, who, batch, context)
    if "graphs" in parts:
        for most in GRAPHED:
            graphs(model, path, who, most)
    if not {"exact", "prefill"} & set(parts):
        return
    fixed = model_of(held, "auto", exact=True)
    if "exact" in parts:
        for batch, context in PRICED:
            decode(model, path, who, batch, context)
            decode(fixed, path, "exact", batch, context)
    if "prefill" in parts:
        for tokens in (2048, 8192):
            prefill(model, path, "body", tokens)
        prefill(fixed, path, "exact", 8192)


if __name__ == "__main__":
    main()
