"""A hand-off between two devices at K3's true sizes: `python -m benchmarks.handoff`.

Two processes, each with pools on its own device (or both on one). The receiver READs requests of
1k, 8k and 64k tokens over NIXL: in the pools' own layout, bare and verified; cut as a layer-major
layout would be; as one span of the same bytes; and by torch's peer copy where one process sees both
devices. All in one run; medians of `RUNS`, one JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import RESULTS, machine, summary
from common.cache.kda_pool import StatePool
from common.cache.mla_pool import LatentPool, pages_of
from common.config.checkpoint import parse_spec
from common.config.release import RELEASE
from common.config.spec import ModelSpec
from common.contract.messages import Endpoint
from common.contract.regions import PoolInfo, Span
from common.ops.digest import Signature
from common.transfer.link import Pair, pair_spans
from common.transfer.nixl import NixlLink
from common.transfer.verify import match

RUNS, WARM = 15, 3
SIZES = (1024, 8192, 65536)
AT_ONCE = (1, 2, 4, 8)


class Pools:
    """One side: pools for eight requests, registered."""

    def __init__(self, spec: ModelSpec, name: str, device: str, tokens: int) -> None:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        dtype = torch.bfloat16
        self.states = StatePool(spec.text, max(AT_ONCE), dtype=dtype, device=device)
        self.latents = LatentPool(spec.text, pages_of(tokens), dtype=dtype, device=device)
        self.link = NixlLink(name)
        self.infos: tuple[PoolInfo, ...] = (
            self.link.register("state", self.states.state),
            self.link.register("conv", self.states.conv),
            self.link.register("latent", self.latents.pages),
        )

    def spans(self, slot: int, first_page: int, tokens: int) -> list[Span]:
        pages = tuple(range(first_page, first_page + pages_of(tokens)))
        return [*self.states.span(slot).values(), *self.latents.spans(pages)]

    def measure(self, slot: int, first_page: int, tokens: int) -> Signature:
        pages = tuple(range(first_page, first_page + pages_of(tokens)))
        return self.states.sign(slot) | self.latents.measure(pages, tokens)


def produce(pipe: Connection, spec: ModelSpec, device: str, tokens: int) -> None:
    """The other process: fill the pools, say where they are, sign what is asked for."""
    pools = Pools(spec, "producer", device, tokens)
    generator = torch.Generator(device).manual_seed(1)
    for tensor in (pools.states.state, pools.states.conv, pools.latents.pages):
        for part in tensor:
            part.normal_(generator=generator)
    pipe.send((pools.link.metadata(), pools.infos))
    while (asked := pipe.recv()) is not None:
        begin = time.perf_counter()
        sums = pools.measure(*asked).sums
        pipe.send((sums, time.perf_counter() - begin))


def layer_major(pairs: Sequence[Pair], spec: ModelSpec, pools: Pools) -> list[Pair]:
    """The same bytes in pieces of one layer of one slot, or of one layer of one page."""
    text = spec.text
    piece = {
        "state": pools.states.state_bytes // len(text.kda_layers),
        "conv": pools.states.conv_bytes // len(text.kda_layers),
        "latent": pools.latents.page_bytes // len(text.mla_layers),
    }
    cut: list[Pair] = []
    for pair in pairs:
        size = piece[pair[0].pool]
        for at in range(0, pair[0].size, size):
            mine, theirs = (Span(pool=s.pool, offset=s.offset + at, size=size) for s in pair)
            cut.append((mine, theirs))
    return cut


def wait(reads: Sequence[Any]) -> None:
    for read in reads:
        while not read.poll():
            pass
        read.release()


def timed(call: Callable[[], object], device: str) -> Any:
    seconds = []
    for run in range(WARM + RUNS):
        begin = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        if run >= WARM:
            seconds.append(time.perf_counter() - begin)
    return summary(seconds)


def keep(case: dict[str, Any], timing: Any, moved: int) -> None:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    seconds = {key: round(getattr(timing, key), 7) for key in ("p50", "p05", "p95")}
    line = {"case": case, "bytes": moved, "seconds": seconds, "devices": names}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "handoff.jsonl").open("a") as file:
        file.write(json.dumps(line | {"machine": machine()}) + "\n")
    rate = moved / timing.p50 / 1e9
    what = f"{case['tokens']:6} tokens  x{case['at_once']}  {case['way']:22}"
    print(
        f"{what} {timing.p50 * 1e3:9.3f} ms ({timing.p05 * 1e3:.3f}-{timing.p95 * 1e3:.3f}) "
        f"{rate:7.1f} GB/s  {case['descriptors']} descriptors",
        flush=True,
    )


def run(spec: ModelSpec, producer: str, receiver: str, sizes: Sequence[int]) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    other = context.Process(target=produce, args=(theirs, spec, producer, max(sizes)), daemon=True)
    other.start()
    pools = Pools(spec, "receiver", receiver, max(sizes))
    metadata, infos = mine.recv()
    peer = Endpoint(
        room="prefill",
        id="producer",
        epoch=1,
        host="",
        port=0,
        agent="producer",
        agent_metadata=metadata,
        pools=infos,
        model_print="",
        layout_print="",
    )
    pools.link.connect(peer)
    try:
        for tokens in sizes:
            one(spec, pools, peer, mine, tokens, producer, receiver)
        several(pools, peer, 8192 if 8192 in sizes else sizes[0], receiver, max(sizes))
    finally:
        mine.send(None)
        other.join(20)


def one(
    spec: ModelSpec,
    pools: Pools,
    peer: Endpoint,
    pipe: Connection,
    tokens: int,
    producer: str,
    receiver: str,
) -> None:
    """One request in every way."""
    spans = pools.spans(0, 0, tokens)
    pairs, moved = pair_spans(spans, spans), sum(span.size for span in spans)
    pipe.send((0, 0, tokens))
    signed, sign_s = pipe.recv()
    pipe.send((0, 0, tokens))
    signed, sign_s = pipe.recv()  # again: the first compiled

    def verified() -> None:
        wait([pools.link.read(peer, pairs)])
        match(signed, pools.measure(0, 0, tokens))

    size = min(moved, pools.infos[0].size)
    whole = [(Span(pool="state", offset=0, size=size),) * 2]
    ways: dict[str, tuple[Callable[[], object], int, int]] = {
        "wire-first": (lambda: wait([pools.link.read(peer, pairs)]), len(pairs), moved),
        "wire-first, verified": (verified, len(pairs), moved),
        "one span": (lambda: wait([pools.link.read(peer, whole)]), 1, size),
        "digest alone": (lambda: pools.measure(0, 0, tokens), 0, moved),
    }
    cut = layer_major(pairs, spec, pools)
    ways["layer-major"] = (lambda: wait([pools.link.read(peer, cut)]), len(cut), moved)
    if producer != receiver and torch.cuda.device_count() > 1:
        there = torch.empty(moved, dtype=torch.uint8, device=producer)
        here = torch.empty(moved, dtype=torch.uint8, device=receiver)
        ways["torch peer copy"] = (lambda: here.copy_(there), 1, moved)
    for way, (call, descriptors, size) in ways.items():
        case = {"tokens": tokens, "at_once": 1, "way": way, "descriptors": descriptors}
        keep(case, timed(call, receiver), size)
    print(f"{tokens:6} tokens, signed in {sign_s * 1e3:.3f} ms by the producer", flush=True)


def several(pools: Pools, peer: Endpoint, tokens: int, receiver: str, room: int) -> None:
    """Several requests at once, bare."""
    for count in AT_ONCE[1:]:
        if count * tokens > room:
            continue
        spans = [pools.spans(i, i * pages_of(tokens), tokens) for i in range(count)]
        pairs = [pair_spans(some, some) for some in spans]

        def call(pairs: list[list[Pair]] = pairs) -> None:
            wait([pools.link.read(peer, some) for some in pairs])

        moved = sum(span.size for some in spans for span in some)
        case = {"tokens": tokens, "at_once": count, "way": "wire-first"}
        keep(case | {"descriptors": len(pairs[0])}, timed(call, receiver), moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--producer", default="cuda:0")
    parser.add_argument("--receiver", default="cuda:1")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a trial on a CPU")
    args = parser.parse_args()
    spec, sizes = parse_spec(RELEASE), SIZES
    if args.small:
        from common.config.checkpoint import load_spec
        from tests.support.golden import NANO

        spec, sizes = load_spec(NANO), (1024, 8192)
    run(spec, args.producer, args.receiver, sizes)


if __name__ == "__main__":
    main()
