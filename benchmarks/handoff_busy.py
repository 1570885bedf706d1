"""Hand-offs while steps run, and layers pulled while the last chunk computes, at K3's true sizes.

    python -m benchmarks.handoff_busy steps [--devices 1|2]
    python -m benchmarks.handoff_busy layers [--devices 1|2]

`steps`: the receiver runs the decode step of a four-layer slice as a CUDA graph, over and over,
while 1 to 8 hand-offs at once land in its pools and are verified, without a pause or 20 times a
second; the producer is idle, or multiplies matrices. How long hand-offs take, and how much steps
slow down, as a mean. On one device the two processes share it by turns, so that only the idle
producer's figures say something about two.

`layers`: the producer computes the last chunk of a prompt through all 93 layers (those of the slice
over and over) and says when each group of layers is final; the receiver READs and digests the group
meanwhile. What is left to do once the chunk is computed, against handing everything off then. A
prototype of the order of things: rooms hand off whole tickets.

Longer than 300 lines because two processes and their work stand side by side with what is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.handoff_sides import (
    Side,
    devices_of,
    keep,
    never,
    other_process,
    place,
    spec_of,
    told,
)
from benchmarks.harness import summary
from common.cache.mla_pool import pages_of
from common.config.spec import ModelSpec
from common.contract.messages import Endpoint
from common.runtime.landing import Landing
from common.runtime.place import Place
from common.transfer.link import pair_spans
from common.transfer.receiver import Receiver

TOKENS, LAST = 8192, 2048
AT_ONCE = (1, 2, 4, 8)
PAUSES_S = (0.0, 0.05)  # between one hand-off's end and the next's beginning
ROUNDS, STEPS = 5, 40
WARM, RUNS = 1, 5  # of whole prompts
BEFORE = (TOKENS - LAST) // 64  # pages of earlier chunks
GROUPS = 12  # of layers, in the last chunk
Step = Callable[[], None]


# --- hand-offs while steps run


def lend(pipe: Connection, spec: ModelSpec, device: str) -> None:
    """The producer: pools full of numbers, and matrices to multiply when told."""
    side = Side(spec, "producer", device, slots=max(AT_ONCE), pages=max(AT_ONCE) * pages_of(TOKENS))
    side.fill()
    pipe.send(side.endpoint())
    busy = matrices(side)
    while (asked := pipe.recv()) is not None:
        if asked == "compute":
            pipe.send(None)
            while not pipe.poll():
                busy()
                side.settle()
        else:
            pipe.send([side.memory.measure(place(n, TOKENS)).sums for n in range(max(AT_ONCE))])


def matrices(side: Side) -> Step:
    """A product of 3 ms or so on an H200."""
    size = 8192 if side.is_cuda else 256
    dtype = torch.bfloat16 if side.is_cuda else torch.float32
    left, right = (torch.randn(size, size, device=side.device, dtype=dtype) for _ in range(2))

    def call() -> None:
        torch.mm(left, right)

    return call


def decode_step(side: Side, batch: int, context: int) -> Step:
    """The slice's decode step as a graph; on a CPU a product stands for it."""
    if not side.is_cuda:
        return matrices(side)
    from benchmarks.slice import SPEC, memory, weights
    from benchmarks.step import model_of, step_plan

    model, plan = model_of(weights(), "triton"), step_plan(batch, context)
    pools = memory(SPEC, batch, plan.tables.numel())
    ids = torch.randint(0, SPEC.vocab, (batch,), device=side.device)
    model.step(ids, plan, pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        model.step(ids, plan, pools)
    return graph.replay


class Landings:
    """Hand-offs that land over and over, in threads, until told to stop."""

    def __init__(self, side: Side, peer: Endpoint, signed: Sequence[dict[str, int]]) -> None:
        self.side, self.peer, self.signed = side, peer, signed
        self.receiver = Receiver(side.link, quarantine_bound=1)
        self.seconds: list[float] = []
        self._over = threading.Event()

    def one(self, number: int) -> None:
        where = place(number, TOKENS)
        landing, spans = Landing(self.side.memory, where), self.side.spans(where)
        pieces = landing.pieces([(self.peer, pair_spans(spans, spans))])
        self.receiver.fetch_all(pieces, 30.0, never, lambda: None, landing.landed, landing.prepare)
        self.receiver.verify(self.signed[number], landing.signature)

    def some(self, threads: ThreadPoolExecutor, count: int) -> None:
        """So many at once."""
        begin = time.perf_counter()
        list(threads.map(self.one, range(count)))
        self.seconds.append(time.perf_counter() - begin)

    def keep_landing(self, threads: ThreadPoolExecutor, count: int, pause_s: float) -> None:
        self.some(threads, count)
        while not self._over.wait(pause_s):
            self.some(threads, count)

    def stop(self) -> None:
        self._over.set()


def steps(side: Side, step: Step, count: int) -> list[float]:
    """Seconds of so many steps, each waited for as an engine waits for its tokens."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        side.settle_stream()
        seconds.append(time.perf_counter() - begin)
    return seconds


def while_steps_run(side: Side, peer: Endpoint, pipe: Connection, batch: int) -> None:
    pipe.send("sign")
    signed = pipe.recv()
    print("signed; capturing the step", flush=True)
    step = decode_step(side, batch, 8192)
    steps(side, step, 5)
    with ThreadPoolExecutor(max(AT_ONCE)) as threads:
        for producer in ("idle", "computes"):
            if producer == "computes":
                pipe.send("compute")
                pipe.recv()
            for count, pause_s in itertools.product(AT_ONCE, PAUSES_S):
                case = {"what": "steps", "at_once": count, "producer": producer, "batch": batch}
                one_case(side, peer, signed, step, threads, case | {"pause_s": pause_s})
    pipe.send("sign")  # ends its computing
    pipe.recv()


def one_case(
    side: Side,
    peer: Endpoint,
    signed: Sequence[dict[str, int]],
    step: Step,
    threads: ThreadPoolExecutor,
    case: dict[str, Any],
) -> None:
    """Hand-offs alone, steps alone, and both, in turn."""
    alone, resting, during, busy = (list[float]() for _ in range(4))
    rounds = Landings(side, peer, signed)
    for _ in range(3):
        rounds.some(threads, case["at_once"])
    for _ in range(ROUNDS):
        quiet = Landings(side, peer, signed)
        for _ in range(6):
            quiet.some(threads, case["at_once"])
        alone += quiet.seconds
        resting += steps(side, step, STEPS)
        landing = Landings(side, peer, signed)
        beside = threading.Thread(
            target=landing.keep_landing, args=(threads, case["at_once"], case["pause_s"])
        )
        beside.start()
        busy += steps(side, step, STEPS)
        landing.stop()
        beside.join()
        during += landing.seconds
    slower = statistics.mean(busy) / statistics.mean(resting) - 1
    for name, seconds in (
        ("hand-off alone", alone),
        ("hand-off during steps", during),
        ("step alone", resting),
        ("step during hand-offs", busy),
    ):
        keep(
            "handoff",
            case | {"figure": name},
            summary(seconds),
            mean=round(statistics.mean(seconds), 7),
        )
        print(f"{name:22} {told(summary(seconds))}")
    print(
        f"producer {case['producer']}, {case['at_once']} at once, pauses of {case['pause_s']:g} s: "
        f"{len(during)} landed in {sum(busy):.2f} s, steps are {slower * 100:.1f} % slower",
        flush=True,
    )


# --- layers pulled while the last chunk computes


def compute(pipe: Connection, spec: ModelSpec, device: str, groups: int) -> None:
    """The producer: the last chunk over all layers; says when a group is final, then the digests.

    Answers "groups" and "whole" with (group, when) and at last (digests, when the chunk was done).
    """
    side = Side(spec, "producer", device, slots=1, pages=pages_of(TOKENS))
    side.fill()
    chunk = last_chunk(side, spec)
    pipe.send(side.endpoint())
    where = place(0, TOKENS)
    while (asked := pipe.recv()) is not None:
        borders = cuts(spec, groups if asked == "groups" else 1)
        tell_groups(pipe, side, spec, where, borders, chunk)


def cuts(spec: ModelSpec, groups: int) -> list[int]:
    """Layers at which groups end; the last group is short, since nothing hides its way."""
    layers = spec.text.num_layers
    even = {layers * (n + 1) // groups for n in range(groups - 1)}
    return sorted({layers} if groups == 1 else even - {0} | {layers - 2, layers})


def tell_groups(
    pipe: Connection,
    side: Side,
    spec: ModelSpec,
    where: Place,
    borders: Sequence[int],
    chunk: Callable[[Callable[[int], None]], None],
) -> None:
    """Compute; tell of each group as soon as it is final, and digest it beside the next."""
    signing = Signing(side, spec, where, borders)
    signing.add([(2, 0, BEFORE)])  # pages of earlier chunks were signed when they were filled
    final: dict[int, Any] = {}
    ready = [threading.Event() for _ in borders]

    def after(layer: int) -> None:
        if layer + 1 in borders:
            number = borders.index(layer + 1)
            if side.is_cuda:
                final[number] = torch.cuda.Event()
                final[number].record()
            ready[number].set()

    computing = threading.Thread(target=chunk, args=(after,))
    begin = time.monotonic()
    computing.start()
    for number, event in enumerate(ready):
        event.wait()
        if side.is_cuda:
            final[number].synchronize()
        done = time.monotonic()
        if len(borders) > 1:
            pipe.send((number, done))
        signing.add(signing.made(number))
    computing.join()
    pipe.send((signing.sums(), done, done - begin))


class Signing:
    """The producer's digests, taken beside its computation."""

    def __init__(self, side: Side, spec: ModelSpec, where: Place, borders: Sequence[int]) -> None:
        self._spec, self._borders = spec, borders
        self._stretches = side.memory.stretches(where)
        self._stream = torch.cuda.Stream(side.device, priority=-1) if side.is_cuda else None
        with self._beside():
            self._summing = side.memory.summing(self._stretches)

    def made(self, number: int) -> list[tuple[int, int, int]]:
        """What the last chunk made of a group."""
        cuts = group(self._spec, self._borders, number)
        return [(w, max(low, BEFORE) if w == 2 else low, high) for w, low, high in cuts]

    def add(self, cuts: Sequence[tuple[int, int, int]]) -> None:
        names = [len(stretch.names) for stretch in self._stretches]
        rows = [
            row
            for which, low, high in cuts
            if low < high
            for row in self._stretches[which].rows(low, high, sum(names[:which]))
        ]
        with self._beside():
            self._summing.add(rows)

    def sums(self) -> dict[str, int]:
        with self._beside():
            return self._summing.signature().sums

    def _beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()


def group(spec: ModelSpec, borders: Sequence[int], number: int) -> list[tuple[int, int, int]]:
    """(stretch, first unit, unit behind the last) that are final when group `number` is.

    State and convolution rows go by layer. Latents go by page: those before the last chunk are
    final from the start and go with the first group, the others, of all layers, with the last.
    """
    low = sum(layer < (borders[number - 1] if number else 0) for layer in spec.text.kda_layers)
    high = sum(layer < borders[number] for layer in spec.text.kda_layers)
    found = [(which, low, high) for which in (0, 1) if low < high]
    if number == len(borders) - 1:
        found.append((2, 0 if number == 0 else BEFORE, pages_of(TOKENS)))
    elif number == 0:
        found.append((2, 0, BEFORE))
    return found


def last_chunk(side: Side, spec: ModelSpec) -> Callable[[Callable[[int], None]], None]:
    """The last `LAST` tokens of the prompt through all layers; `after(layer)` behind each."""
    if not side.is_cuda:
        busy = matrices(side)

        def small(after: Callable[[int], None]) -> None:
            for layer in range(spec.text.num_layers):
                busy()
                after(layer)

        return small
    from benchmarks.slice import BF16, SPEC, weights
    from common.model.batch import Share, StepBatch
    from common.model.text import TextModel
    from common.ops.select import choose

    text = dataclasses.replace(
        SPEC,
        num_layers=spec.text.num_layers,
        kda_layers=spec.text.kda_layers,
        mla_layers=spec.text.mla_layers,
        moe_layers=tuple(range(1, spec.text.num_layers)),
    )
    ops, _ = choose("triton", SPEC, quantization="mxfp4", dtype=BF16, device=side.device)
    few = weights()
    layers = [few.layers[3 if n in text.mla_layers else 1] for n in range(text.num_layers)]
    layers[0] = few.layers[0]
    model = TextModel(text, dataclasses.replace(few, layers=tuple(layers)), ops=ops, exact=False)
    share = Share(
        slot=0,
        pages=tuple(range(pages_of(TOKENS))),
        start=TOKENS - LAST,
        token_ids=tuple(torch.randint(0, SPEC.vocab, (LAST,)).tolist()),
    )
    batch, layer_of = StepBatch(kind="chunks", shares=(share,)), model._layer

    def chunk(after: Callable[[int], None]) -> None:
        def layer(number: int, *more: Any) -> None:
            layer_of(number, *more)
            after(number)

        torch.cuda.set_device(side.device)
        model._layer = layer  # type: ignore[method-assign]
        model.forward(batch, side.memory.tensors)

    return chunk


class Puller:
    """The receiver of groups: READs each as it is told of, digests it, and adds up."""

    def __init__(self, side: Side, peer: Endpoint, spec: ModelSpec) -> None:
        self.side, self.peer, self.spec = side, peer, spec
        self.receiver = Receiver(side.link, quarantine_bound=1)
        self.where = place(0, TOKENS)

    def pull(self, pipe: Connection, groups: int) -> tuple[float, float, dict[str, float]]:
        """One hand-off: seconds exposed after the chunk, seconds of the chunk, and more."""
        borders = cuts(self.spec, groups)
        landing = Landing(self.side.memory, self.where, piece_bytes=1 << 40)
        landing._cuts = [group(self.spec, borders, n) for n in range(len(borders))]
        spans, late = self.side.spans(self.where), 0.0
        sources = [(self.peer, pair_spans(spans, spans))]
        pieces = landing.pieces(sources)
        pipe.send("groups" if groups > 1 else "whole")
        if groups > 1:
            for _ in borders:
                number, done = pipe.recv()
                shown = partial(landing.landed, number)
                self.receiver.fetch_all(
                    [pieces[number]], 30.0, never, lambda: None, lambda _, show=shown: show()
                )
                late = time.monotonic() - done
            signed, done, took = pipe.recv()
        else:
            signed, done, took = pipe.recv()
            landing = Landing(self.side.memory, self.where)
            pieces = landing.pieces(sources)
            self.receiver.fetch_all(
                pieces, 30.0, never, lambda: None, landing.landed, landing.prepare
            )
        self.receiver.verify(signed, landing.signature)
        return time.monotonic() - done, took, {"last_group_s": late}


def pulled_by_layers(side: Side, peer: Endpoint, pipe: Connection, spec: ModelSpec) -> None:
    """Both orders turn about."""
    puller = Puller(side, peer, spec)
    exposed: dict[int, list[float]] = {1: [], GROUPS: []}
    chunks: list[float] = []
    for run in range(WARM + RUNS):
        for groups, seconds in exposed.items():
            after, chunk, more = puller.pull(pipe, groups)
            if run >= WARM:
                seconds.append(after)
                chunks.append(chunk)
    for groups, seconds in exposed.items():
        case = {"what": "layers", "groups": groups, "tokens": TOKENS, "last_chunk": LAST}
        keep("handoff", case, summary(seconds))
        print(f"{groups:3} groups: exposed {told(summary(seconds))}")
    print(f"the chunk itself {told(summary(chunks))}; the last group alone {more}")
    share = statistics.median(exposed[GROUPS]) / statistics.median(exposed[1])
    print(f"exposed: {share:.2f} of handing all off afterwards", flush=True)


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("steps", "layers"))
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a trial on a CPU")
    args = parser.parse_args()
    spec = spec_of(args.small)
    producer, receiver = devices_of(args.devices, args.small)
    target, more = (lend, ()) if args.what == "steps" else (compute, (GROUPS,))
    with other_process(target, spec, producer, *more) as pipe:
        count = max(AT_ONCE) if args.what == "steps" else 1
        side = Side(spec, "receiver", receiver, slots=count, pages=count * pages_of(TOKENS))
        peer = pipe.recv()
        side.link.connect(peer)
        if args.what == "steps":
            while_steps_run(side, peer, pipe, args.batch)
        else:
            pulled_by_layers(side, peer, pipe, spec)


if __name__ == "__main__":
    main()
