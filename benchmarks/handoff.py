"""A hand-off at K3's true sizes: `python -m benchmarks.handoff [--devices 1|2]`.

Two processes, each with pools on its own device (or both on one). The receiver READs requests of
1k, 8k and 64k tokens over NIXL in every way there is: as one span of the same bytes, in the pools'
own layout, cut as a layer-major layout would be, packed into one buffer first, and by torch's copy
where one process sees both sides; bare, verified after the READ, and verified piece by piece while
the READ goes on, as a decode room does it. All ways turn about in one run; medians of `RUNS`, one
JSON line a case in `results/handoff.jsonl`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection

import torch

from benchmarks.handoff_sides import (
    Clock,
    Side,
    devices_of,
    ended,
    ignored,
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
from common.contract.regions import Span
from common.ops.digest import Signature
from common.runtime.landing import Landing
from common.runtime.place import Place
from common.transfer.digest import digest_latents, digest_slot
from common.transfer.link import Pair, pair_spans
from common.transfer.receiver import Receiver
from common.transfer.verify import match

RUNS, WARM = 15, 3
SLOW_S = 0.1
SIZES = (1024, 8192, 65536)
AT_ONCE = (1, 2, 4, 8)
PIECES_MB = (64, 128, 256, 384, 512)
WHOLE_MB = 1 << 20  # more than any request: one piece
STAGED_MB = (384, 512, WHOLE_MB)
Way = Callable[[], object]


def produce(pipe: Connection, spec: ModelSpec, device: str, tokens: int) -> None:
    """The other process: fill the pools, say where they are, sign and pack what is asked for."""
    side = Side(spec, "producer", device, slots=max(AT_ONCE), pages=pages_of(tokens))
    whole = sum(s.count * s.unit_bytes for s in side.memory.stretches(place(0, tokens)))
    packed = torch.empty(whole, dtype=torch.uint8, device=device)
    side.lend("packed", packed)
    side.fill()
    pipe.send(side.endpoint())
    while (asked := pipe.recv()) is not None:
        what, where = asked
        if what == "pack":
            copy_out(side, where, packed)
            side.settle()
            pipe.send(None)
        else:
            begin = time.perf_counter()
            sums = side.memory.measure(where).sums
            pipe.send((sums, time.perf_counter() - begin))


def copy_out(side: Side, where: Place, packed: torch.Tensor) -> None:
    """A request's spans, one behind the other, into a buffer."""
    for at, view in views(side, where):
        packed[at : at + view.numel()].copy_(view)


def views(side: Side, where: Place) -> list[tuple[int, torch.Tensor]]:
    """A request's bytes, span by span, and where each would stand in one buffer."""
    memory = side.memory
    pools = {
        "state": memory.states.state,
        "conv": memory.states.conv,
        "latent": memory.latents.pages,
    }
    found, at = [], 0
    for span in side.spans(where):
        flat = pools[span.pool].view(-1).view(torch.uint8)
        found.append((at, flat[span.offset : span.offset + span.size]))
        at += span.size
    return found


class Bench:
    """One request size, in every way."""

    def __init__(self, side: Side, peer: Endpoint, pipe: Connection, tokens: int) -> None:
        self.side, self.peer, self.pipe, self.tokens = side, peer, pipe, tokens
        self.place = place(0, tokens)
        spans = side.spans(self.place)
        self.pairs = pair_spans(spans, spans)
        self.moved = sum(span.size for span in spans)
        self.receiver = Receiver(side.link, quarantine_bound=1)
        for _ in range(2):  # again: the first compiled
            pipe.send(("sign", self.place))
            self.signed, self.sign_s = pipe.recv()

    def verified(self, piece_bytes: int, at: Callable[[str], None] = ignored) -> None:
        """As a decode room takes a hand-off in; tells `at` what was just done."""
        landing = Landing(self.side.memory, self.place, piece_bytes=piece_bytes)
        pieces = landing.pieces([(self.peer, self.pairs)])
        at("planned")

        def posted() -> None:
            at("first pieces posted")
            landing.prepare()
            at("digests prepared")

        def landed(number: int) -> None:
            at("last piece waited for")
            landing.landed(number)
            at("its digest launched")

        def signature() -> Signature:
            found = landing.signature()
            at("sums brought")
            return found

        self.receiver.fetch_all(pieces, 30.0, never, lambda: None, landed, posted)
        at("READ ended")
        self.receiver.verify(self.signed, signature)
        at("compared")

    def stages(self, piece_bytes: int) -> None:
        """Where the time goes: medians of what each step of `verified` took."""
        took: dict[str, list[float]] = {}
        for _ in range(WARM + 2 * RUNS):
            clock = Clock()
            self.verified(piece_bytes, clock)
            steps = list(clock.last.items())
            for (_, before), (what, after) in pairwise(steps):
                took.setdefault(what, []).append(after - before)
            took.setdefault("all of it", []).append(steps[-1][1] - steps[0][1])
            self.side.settle()
        size = piece_bytes >> 20
        told_size = "one piece" if size == WHOLE_MB else f"pieces of {size} MiB"
        for what, seconds in took.items():
            timing = summary(seconds[WARM:])
            case = {"tokens": self.tokens, "at_once": 1, "piece_mib": size, "stage": what}
            keep("handoff", case, timing, bytes=self.moved)
            print(f"{self.tokens:6} {told_size}: {what:22} {told(timing)}", flush=True)

    def in_pieces(self, piece_bytes: int) -> None:
        """The same READs, nothing verified."""
        landing = Landing(self.side.memory, self.place, piece_bytes=piece_bytes)
        pieces = landing.pieces([(self.peer, self.pairs)])
        self.receiver.fetch_all(pieces, 30.0, never, lambda: None)

    def verified_after(self) -> None:
        """The READ first, then a launch and a wait for every kind: as it was before."""
        self.bare(self.pairs)
        states, latents, where = self.side.memory.states, self.side.memory.latents, self.place
        found = digest_slot(states.state[where.slot], states.conv[where.slot], states.layers)
        pages = latents.pages[where.pages[0] : where.pages[-1] + 1]
        match(self.signed, found | digest_latents(pages, latents.layers, self.tokens))

    def bare(self, pairs: Sequence[Pair]) -> None:
        ended([self.side.link.read(self.peer, pairs)])

    def packed(self, buffer: torch.Tensor) -> None:
        """Ask for one buffer, READ it, spread it."""
        self.pipe.send(("pack", self.place))
        self.pipe.recv()
        span = Span(pool="packed", offset=0, size=self.moved)
        self.bare([(span, span)])
        for at, view in views(self.side, self.place):
            view.copy_(buffer[at : at + view.numel()])

    def layer_major(self) -> list[Pair]:
        """The same bytes in pieces of one layer of one slot, or of one layer of one page."""
        memory = self.side.memory
        size = {s.kind: s.unit_bytes for s in memory.stretches(self.place)}
        size["latent"] //= len(memory.latents.layers)
        cut: list[Pair] = []
        for pair in self.pairs:
            step = size[pair[0].pool]
            for at in range(0, pair[0].size, step):
                mine, theirs = (Span(pool=s.pool, offset=s.offset + at, size=step) for s in pair)
                cut.append((mine, theirs))
        return cut

    def ways(self, buffer: torch.Tensor, producer: str) -> dict[str, tuple[Way, int]]:
        """Every way, and its descriptors."""
        one = Span(pool="state", offset=0, size=min(self.moved, self.side.infos[0].size))
        packed = Span(pool="packed", offset=0, size=self.moved)
        cut = self.layer_major()
        there = torch.empty(self.moved, dtype=torch.uint8, device=producer)
        ways: dict[str, tuple[Way, int]] = {
            "one span": (lambda: self.bare([(one, one)]), 1),
            "one span, packed pool": (lambda: self.bare([(packed, packed)]), 1),
            "wire-first": (lambda: self.bare(self.pairs), len(self.pairs)),
            "verified after the READ": (self.verified_after, len(self.pairs)),
            "packed, with packing": (lambda: self.packed(buffer), 1),
            "copy by torch": (lambda: buffer[: self.moved].copy_(there), 0),
            "digest alone": (lambda: self.side.memory.measure(self.place), 0),
        }
        if len(cut) < 5000:  # beyond, a run takes a second
            ways["layer-major"] = (lambda: self.bare(cut), len(cut))
        for size in PIECES_MB:
            piece = size << 20
            ways[f"verified, pieces of {size} MiB"] = (partial(self.verified, piece), 0)
        ways["64 MiB pieces, bare"] = (partial(self.in_pieces, 64 << 20), 0)
        ways["verified, one piece"] = (partial(self.verified, WHOLE_MB << 20), 0)
        return ways

    def run(self, buffer: torch.Tensor, producer: str) -> None:
        ways = self.ways(buffer, producer)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for run in range(WARM + RUNS):
            for way, (call, _) in ways.items():
                begin = time.perf_counter()
                call()
                self.side.settle()
                took = time.perf_counter() - begin
                if run >= WARM:
                    seconds[way].append(took)
                elif took > SLOW_S:
                    print(f"warming up: {way} took {took:.2f} s", flush=True)
        best = min(summary(seconds[way]).p50 for way in ways if way.startswith("one span"))
        for way, (_, descriptors) in ways.items():
            timing = summary(seconds[way])
            case = {"tokens": self.tokens, "at_once": 1, "way": way, "descriptors": descriptors}
            keep("handoff", case, timing, bytes=self.moved)
            rate = self.moved / timing.p50 / 1e9
            print(
                f"{self.tokens:6} {way:28} {told(timing)} {rate:7.1f} GB/s "
                f"{timing.p50 / best:5.2f} of the best single span",
                flush=True,
            )
        for size in STAGED_MB:
            self.stages(size << 20)
        print(f"{self.tokens:6} signed in {self.sign_s * 1e3:.3f} ms by the producer", flush=True)


def several(side: Side, peer: Endpoint, tokens: int, most: int) -> None:
    """Several requests at once, bare."""
    for count in AT_ONCE[1:]:
        if count * tokens > most:
            continue
        spans = [side.spans(place(i, tokens)) for i in range(count)]
        pairs = [pair_spans(some, some) for some in spans]
        seconds = []
        for run in range(WARM + RUNS):
            begin = time.perf_counter()
            ended([side.link.read(peer, some) for some in pairs])
            if run >= WARM:
                seconds.append(time.perf_counter() - begin)
        moved = sum(span.size for some in spans for span in some)
        timing = summary(seconds)
        case = {"tokens": tokens, "at_once": count, "way": "wire-first", "descriptors": 3}
        keep("handoff", case, timing, bytes=moved)
        print(f"{tokens:6} x{count} wire-first {told(timing)} {moved / timing.p50 / 1e9:.1f} GB/s")


def main() -> None:
    """Every size in every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    parser.add_argument("--tokens", type=int, nargs="*", default=SIZES)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a trial on a CPU")
    args = parser.parse_args()
    spec, most = spec_of(args.small), max(args.tokens)
    producer, receiver = devices_of(args.devices, args.small)
    with other_process(produce, spec, producer, most) as pipe:
        side = Side(spec, "receiver", receiver, slots=max(AT_ONCE), pages=pages_of(most))
        whole = sum(s.count * s.unit_bytes for s in side.memory.stretches(place(0, most)))
        buffer = torch.empty(whole, dtype=torch.uint8, device=receiver)
        side.lend("packed", buffer)
        peer = pipe.recv()
        side.link.connect(peer)
        for tokens in args.tokens:
            Bench(side, peer, pipe, tokens).run(buffer, producer)
        several(side, peer, 8192 if 8192 in args.tokens else args.tokens[0], most)


if __name__ == "__main__":
    main()
