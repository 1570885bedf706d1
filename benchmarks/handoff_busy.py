"""Hand-offs while steps run, at K3's true sizes, on one device or two (`--devices 2`).

The receiver runs the decode step of a four-layer slice as a CUDA graph, over and over, while 1 to 8
hand-offs at once land in its pools and are verified, without a pause or 20 times a second; the
producer is idle, or multiplies matrices. How long hand-offs take, and how much steps slow down, as
a mean. On one device the two processes share it by turns, so that only the idle producer's figures
say something about two.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from common.runtime.loaded import use_device
from common.transfer.link import pair_spans
from common.transfer.receiver import Receiver

TOKENS = 8192
AT_ONCE = (1, 2, 4, 8)
PAUSES_S = (0.0, 0.05)  # between one hand-off's end and the next's beginning
ROUNDS, STEPS = 5, 40
Step = Callable[[], None]


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
    own = partial(use_device, side.device)
    with ThreadPoolExecutor(max(AT_ONCE), initializer=own) as threads:
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


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a trial on a CPU")
    args = parser.parse_args()
    spec = spec_of(args.small)
    producer, receiver = devices_of(args.devices, args.small)
    with other_process(lend, spec, producer) as pipe:
        count = max(AT_ONCE)
        side = Side(spec, "receiver", receiver, slots=count, pages=count * pages_of(TOKENS))
        peer = pipe.recv()
        side.link.connect(peer)
        while_steps_run(side, peer, pipe, args.batch)


if __name__ == "__main__":
    main()
