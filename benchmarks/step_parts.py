"""Where a decode step's time goes: kernels of the slice by part, each against its floor.

    python -m benchmarks.step_parts OUT.jsonl

A pass of four layers at true width runs eagerly under the profiler; a kernel belongs to the part
whose call launched it. What a captured step takes beyond its kernels is the last part. A part's
floor is the larger of the bytes it must move at the copy rate and, for attention, the flops at the
matrix rate; weights count once, experts as far as some row chose them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.ops import COPY, MATRIX
from benchmarks.slice import SPEC, memory, weights
from benchmarks.step import VOCAB, floor_us, model_of, prefill_us, step_plan
from benchmarks.timing import append, machine, measure
from common.config.checkpoint import parse_spec
from common.config.release import RELEASE
from common.config.spec import CHUNK, TextSpec
from common.config.step import Rates, Rows, floors
from common.model import text
from common.model.batch import Share, StepBatch
from common.model.text import TextModel
from common.ops.table import Ops

CASES = ((1, 1024), (8, 8192), (32, 8192), (64, 8192), (8, 131072))
SLICE = dataclasses.replace(parse_spec(RELEASE), text=SPEC)
RATES = Rates(copy=COPY * 1e6, flops=MATRIX * 1e6, network=0.0)
PRODUCTS = ("linear", "widened")
GAPS = "between kernels"
WHOLE = "whole step"
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_EVENTS = ("cuda_runtime", "cuda_driver")


def part_of(path: tuple[str, ...], spec: TextSpec) -> str:
    """The part a kernel belongs to, by the calls around its launch, outermost first."""
    where, call = (path[0] if path else ""), path[-1] if path else ""
    product = call.startswith("linear")
    if "residual_read" in path:
        return "residual mixing"
    if where == "kda":
        return "KDA step" if call == "kda_mix" else "KDA products" if product else "small, in KDA"
    if where == "mla":
        if "mla_steps" in path or "mla_chunks" in path:
            return "attention"
        return "attention products" if product else "small, in attention"
    if where == "ffn":
        return _part_of_ffn(call, spec)
    return "head" if product else "small, elsewhere"


def _part_of_ffn(call: str, spec: TextSpec) -> str:
    moe, latent = spec.moe, spec.moe.latent or spec.hidden
    shared, dense = moe.num_shared * moe.width, spec.dense_width
    names = {
        f"widened {moe.num_experts}x{spec.hidden}": "router",
        "route": "router",
        f"linear {latent}x{spec.hidden}": "latent products",
        f"linear {spec.hidden}x{latent}": "latent products",
        "experts": "routed experts",
        f"linear {2 * shared}x{spec.hidden}": "shared expert",
        f"linear {spec.hidden}x{shared}": "shared expert",
        f"linear {2 * dense}x{spec.hidden}": "dense network",
        f"linear {spec.hidden}x{dense}": "dense network",
    }
    return names.get(call, "small, in the feed-forward half")


def told(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body, naming itself to the profiler; a product also by its weight's shape."""

    def call(*args: Any, **more: Any) -> Any:
        shape = f" {args[1].shape[0]}x{args[1].shape[1]}" if name in PRODUCTS else ""
        with record_function(f"part:{name}{shape}"):
            return body(*args, **more)

    return call


@contextlib.contextmanager
def telling(model: TextModel) -> Iterator[TextModel]:
    """A model whose calls name themselves."""
    bodies = {
        field.name: told(field.name, body)
        for field in dataclasses.fields(Ops)
        if (body := getattr(model.ops, field.name)) is not None
    }
    ops = dataclasses.replace(model.ops, **bodies)
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in (
            (text.kda, "mix", "kda"), (text.mla, "mix", "mla"), (text, "feed_forward", "ffn"),
        ):  # fmt: skip
            body = told(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, body))
        yield TextModel(model.spec, model.weights, ops=ops, exact=model._exact)


def kernels(trace: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Of a profiler's trace: the named calls around each kernel's launch, and its microseconds."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in HOST_EVENTS and "correlation" in event.get("args", {})
    }
    calls = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("part:"))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("part:")
    )
    begins = [begin for begin, _, _ in calls]
    for event in events:
        if event.get("cat") in DEVICE_EVENTS:
            at = launched.get(event["args"]["correlation"], -1.0)
            around = calls[: bisect_right(begins, at)]
            yield tuple(name for _, end, name in around if end >= at), event["dur"]


def traced(model: TextModel, step: Callable[[TextModel], object]) -> dict[str, list[float]]:
    """Microseconds of every kernel of one pass, by part."""
    with telling(model) as speaking:
        for _ in range(3):
            step(speaking)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step(speaking)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text())
    parts: dict[str, list[float]] = defaultdict(list)
    for path, us in kernels(trace):
        parts[part_of(path, model.spec)].append(us)
    return parts


def measured(model: TextModel, path: Path, batch: int, context: int) -> None:
    """All parts of one case."""
    plan = step_plan(batch, context)
    pools = memory(SPEC, batch, plan.tables.numel())
    ids = torch.randint(0, VOCAB, (batch,), device="cuda")
    if model.ops.plan_steps is not None:
        model.ops.plan_steps(plan, [context - 1] * batch, stays=True)

    def step(one: TextModel) -> object:
        return one.step(ids, plan, pools)

    parts = traced(model, step)
    seconds = floors(SLICE, "bfloat16", Rows(lane=batch, context=context), RATES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model)
    timing = measure([graph.replay], graph=False)
    least = seconds | {WHOLE: floor_us(batch, context) / 1e6}
    keep(path, {"batch": batch, "context": context}, parts, least, timing.us)


def prompt(model: TextModel, path: Path, tokens: int) -> None:
    """All parts of a pass over a prompt, against the flops of its products."""
    pools = memory(SPEC, 1, tokens // CHUNK, full=False)
    ids = tuple(torch.randint(0, VOCAB, (tokens,)).tolist())
    share = Share(slot=0, pages=tuple(range(tokens // CHUNK)), start=0, token_ids=ids)

    def one_pass(one: TextModel) -> object:
        return one.forward(StepBatch(kind="chunks", shares=(share,)), pools)

    parts, least = traced(model, one_pass), prompt_floors(SPEC, tokens)
    timing = measure([lambda: one_pass(model)], replays=5, graph=False)
    least[WHOLE] = prefill_us(tokens) / 1e6
    keep(path, {"prompt": tokens}, parts, least, timing.us)


def prompt_floors(spec: TextSpec, tokens: int) -> dict[str, float]:
    """Seconds of a prompt's products at the matrix rate; other parts have no floor here."""
    h, kda, mla, moe = spec.hidden, spec.kda, spec.mla, spec.moe
    latent, mixing, queries = moe.latent or h, len(spec.moe_layers), mla.nope_dim + mla.rope_dim
    wide = mla.num_heads * mla.v_dim
    values = {
        "KDA products": len(spec.kda_layers) * (
            h * (5 * kda.inner + kda.head_dim + kda.num_heads) + kda.head_dim * kda.inner
        ),
        "attention products": len(spec.mla_layers) * (
            h * ((mla.q_lora_rank or 0) + mla.latent_width + 2 * wide)
            + mla.num_heads * queries * (mla.q_lora_rank or h)
        ),
        "attention": len(spec.mla_layers) * mla.num_heads * (
            (mla.nope_dim + mla.v_dim) * mla.kv_lora_rank + (queries + mla.v_dim) * tokens / 2
        ),
        "router": mixing * moe.num_experts * h,
        "latent products": mixing * 2 * latent * h,
        "routed experts": mixing * moe.top_k * 3 * moe.width * latent,
        "shared expert": mixing * 3 * h * moe.num_shared * moe.width,
        "dense network": (spec.num_layers - mixing) * 3 * h * spec.dense_width,
    }  # fmt: skip
    return {part: 2.0 * tokens * each / RATES.flops for part, each in values.items()}


def keep(
    path: Path,
    case: dict[str, int],
    parts: dict[str, list[float]],
    least: dict[str, float],
    whole_us: float,
) -> None:
    """Write and print a line a part; `least` in seconds."""
    rows = [(part, sum(us), len(us)) for part, us in parts.items()]
    rows += [(GAPS, whole_us - sum(us for _, us, _ in rows), 0)]
    rows += [(WHOLE, whole_us, sum(count for _, _, count in rows))]
    for part, us, launches in rows:
        floor = least.get(part, 0.0) * 1e6
        line = {
            "op": "parts", "case": case | {"part": part}, "who": "body", "us": round(us, 1),
            "floor_us": round(floor, 1), "launches": launches,
            "of_floor": round(floor / us, 3) if us > 0 else 0.0,
        }  # fmt: skip
        append(path, line | {"machine": machine()})
        told = f"{us:9.1f} us {floor:9.1f} floor {launches:4}"
        print(*case.values(), f"{part:32} {told}", flush=True)


def main() -> None:
    """Every case."""
    torch.manual_seed(0)
    model = model_of(weights(), "auto")
    for batch, context in CASES:
        measured(model, Path(sys.argv[1]), batch, context)
    prompt(model, Path(sys.argv[1]), 8192)


if __name__ == "__main__":
    main()
