"""Two processes with pools of K3's true sizes: what the benchmarks of hand-offs share.

The producer's process fills its pools and obeys; the receiver is this process. Each has its own
device, or both have one. It times nothing and judges nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import RESULTS, Timing, commit, machine
from common.cache.mla_pool import pages_of
from common.config.checkpoint import load_spec, parse_spec
from common.config.release import RELEASE
from common.config.spec import ModelSpec
from common.contract.messages import Endpoint
from common.contract.regions import Span
from common.runtime.memory import TextMemory
from common.runtime.place import Place
from common.transfer.nixl import NixlLink


class Side:
    """One process's pools, registered under a NIXL agent."""

    def __init__(self, spec: ModelSpec, name: str, device: str, *, slots: int, pages: int) -> None:
        torch.set_num_threads(1)
        self.device, self.name = torch.device(device), name
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        self.memory = TextMemory(
            spec.text, slots=slots, pages=pages, dtype=torch.bfloat16, device=self.device
        )
        self.link = NixlLink(name)
        self.infos = list(self.memory.register(self.link))

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Register more memory."""
        self.infos.append(self.link.register(name, tensor))

    def fill(self) -> None:
        """Random numbers in every pool."""
        generator = torch.Generator(self.device).manual_seed(1)
        for tensor in (
            self.memory.states.state,
            self.memory.states.conv,
            self.memory.latents.pages,
        ):
            for part in tensor:
                part.normal_(generator=generator)

    def endpoint(self) -> Endpoint:
        return Endpoint(
            room="prefill",
            id=self.name,
            epoch=1,
            host="",
            port=0,
            agent=self.link.agent,
            agent_metadata=self.link.metadata(),
            pools=tuple(self.infos),
            model_print="",
            layout_print="",
        )

    def spans(self, place: Place) -> list[Span]:
        """What a ticket for a place would name; the producer's has the same."""
        return [s for kind in self.memory.stretches(place) for s in kind.spans(0, kind.count)]

    def settle(self) -> None:
        """Wait for the whole device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def settle_stream(self) -> None:
        """Wait for what this thread launched."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()


def place(number: int, tokens: int) -> Place:
    """The place of request `number` when all have `tokens`."""
    pages = pages_of(tokens)
    return Place(
        slot=number, pages=tuple(range(number * pages, (number + 1) * pages)), tokens=tokens
    )


def spec_of(small: bool) -> ModelSpec:
    """The release's, or the bundled checkpoint's for a trial on a CPU."""
    if not small:
        return parse_spec(RELEASE)
    from tests.support.golden import NANO

    return load_spec(NANO)


def devices_of(count: int, small: bool) -> tuple[str, str]:
    """Where producer and receiver live."""
    return ("cpu", "cpu") if small else ("cuda:0", f"cuda:{count - 1}")


@contextmanager
def other_process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """`target(pipe, *arguments)` in a process of its own; told None at the end."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    other = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    other.start()
    theirs.close()
    try:
        yield mine
    finally:
        try:
            mine.send(None)
            other.join(20)
        except BrokenPipeError:
            pass
        if other.is_alive():
            other.terminate()
            other.join(10)


def keep(file: str, case: dict[str, Any], timing: Timing, **more: Any) -> None:
    """Append one line to a file of results."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    seconds = {key: round(getattr(timing, key), 7) for key in ("p50", "p05", "p95")}
    line = {"case": case, "seconds": seconds, **more, "devices": names, "commit": commit()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{file}.jsonl").open("a") as lines:
        lines.write(json.dumps(line | {"machine": machine()}) + "\n")


def told(timing: Timing) -> str:
    """A median and its spread, in milliseconds."""
    return f"{timing.p50 * 1e3:8.3f} ms ({timing.p05 * 1e3:.3f}-{timing.p95 * 1e3:.3f})"


class Clock:
    """When each step was last done."""

    def __init__(self) -> None:
        self.last = {"": time.perf_counter()}

    def __call__(self, what: str) -> None:
        self.last[what] = time.perf_counter()


def ignored(_: str) -> None:
    """Nobody asks when."""


def ended(reads: Sequence[Any]) -> None:
    """Poll READs without a pause until all have ended."""
    for read in reads:
        while not read.poll():
            pass
        read.release()


def never() -> bool:
    """Nothing is cancelled here."""
    return False
