"""One side of a hand-off as a process on a device or a CPU, which another may watch die.

`python -m tests.support.device_side NAME EPOCH DEVICE TOKENS TRANSPORTS` obeys lines: `fill SEED`,
`sign`, `pull ENDPOINT SUMS PIECE_BYTES`, `steps` (for ever), `sound`. It answers with lines of
JSON; while it pulls it says `landed` after the first piece.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

from common.cache.mla_pool import pages_of
from common.config.spec import TextSpec
from common.contract.messages import Endpoint, pack, unpack
from common.errors import ServingError
from common.runtime.landing import Landing
from common.runtime.memory import TextMemory
from common.runtime.place import Place
from common.transfer.link import pair_spans
from common.transfer.nixl import NixlLink
from common.transfer.receiver import Receiver
from tests.support.processes import ROOT
from tests.support.wire import SPEC, endpoint

SLOTS, SLOT, OTHER = 3, 1, 2
PATIENCE_S = 60.0  # for one answer, a start included


def shape_of(device: str) -> TextSpec:
    """The release's layers, all of them on a device, a few on a CPU."""
    kda, mla = (69, 24) if device != "cpu" else (16, 1)
    return dataclasses.replace(
        SPEC,
        kda=dataclasses.replace(SPEC.kda, num_heads=96, head_dim=128),
        mla=dataclasses.replace(SPEC.mla, kv_lora_rank=512, rope_dim=64),
        kda_layers=tuple(range(kda)),
        mla_layers=tuple(range(kda, kda + mla)),
    )


class Served:
    """Pools with one request's place in them, an agent, and a step that is a graph on a device."""

    def __init__(self, name: str, epoch: int, device: str, tokens: int, transports: str) -> None:
        torch.set_num_threads(1)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        pages = pages_of(tokens)
        self.memory = TextMemory(
            shape_of(device), slots=SLOTS, pages=pages + 8, dtype=torch.bfloat16, device=device
        )
        self.link = NixlLink(f"{name}-{epoch}", transports=transports)
        self.endpoint = endpoint(self.link, name, self.memory.register(self.link), epoch=epoch)
        self.place = Place(slot=SLOT, pages=tuple(range(pages)), tokens=tokens)
        self.receiver = Receiver(self.link, quarantine_bound=1)
        self.fill(epoch)
        self.step, self.wanted = self._make_step()
        self.before = self._rest()

    def fill(self, seed: int) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        memory = self.memory
        for pool in (memory.states.state, memory.states.conv, memory.latents.pages):
            for part in pool:
                part.normal_(generator=generator)
        self._settle()

    def pull(self, peer: Endpoint, signed: dict[str, int], piece_bytes: int) -> dict[str, object]:
        """READ the peer's request into the same place and verify it."""
        landing = Landing(self.memory, self.place, piece_bytes=piece_bytes)
        spans = [s for kind in self.memory.stretches(self.place) for s in kind.spans(0, kind.count)]
        freed: list[int] = []

        def landed(number: int) -> None:
            landing.landed(number)
            if number == 0:
                say("landed")

        told = "verified"
        try:
            pieces = landing.pieces([(peer, pair_spans(spans, spans))])
            self.receiver.fetch_all(
                pieces, 60.0, lambda: False, lambda: freed.append(1), landed, landing.prepare
            )
            self.receiver.verify(signed, landing.signature)
        except ServingError as error:
            told = error.code
        return {"told": told, "freed": len(freed), "quarantined": self.receiver.quarantined}

    def sound(self) -> dict[str, bool]:
        """Whether what no READ was to touch is as it was, and the step computes what it did."""
        self.step()
        self._settle()
        return {
            "memory": self._rest() == self.before,
            "step": bool((self.out == self.wanted).all()),
        }

    def steps(self) -> None:
        """Until somebody ends the process."""
        say("stepping")
        while True:
            self.step()

    def _rest(self) -> dict[str, int]:
        pages = self.place.pages
        behind = tuple(range(len(pages), len(pages) + 8))
        return self.memory.measure(Place(slot=OTHER, pages=behind, tokens=8 * 64)).sums

    def _make_step(self) -> tuple[Callable[[], None], torch.Tensor]:
        left, right = (torch.randn(512, 512, device=self.device) for _ in range(2))
        self.out = torch.empty_like(left)

        def eager() -> None:
            for _ in range(20):
                torch.mm(left, right, out=self.out)

        eager()
        step: Callable[[], None] = eager
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            # The agent's progress thread may speak to the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                eager()
            step = graph.replay
        step()
        self._settle()
        return step, self.out.clone()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def say(what: object) -> None:
    sys.stdout.write(f"> {json.dumps(what)}\n")
    sys.stdout.flush()


def main() -> None:
    name, epoch, device, tokens, transports = sys.argv[1:]
    served = Served(name, int(epoch), device, int(tokens), transports)
    say(pack(served.endpoint).hex())
    for line in sys.stdin:
        what, *more = line.split()
        if what == "fill":
            served.fill(int(more[0]))
            say("filled")
        elif what == "sign":
            say(served.memory.measure(served.place).sums)
        elif what == "pull":
            peer = unpack(bytes.fromhex(more[0]))
            assert isinstance(peer, Endpoint)
            say(served.pull(peer, json.loads(more[1]), int(more[2])))
        elif what == "sound":
            say(served.sound())
        elif what == "steps":
            served.steps()


class Other:
    """The handle of such a process; prints what it is told and what it answers, and when."""

    def __init__(self, name: str, epoch: int, device: str, tokens: int, transports: str) -> None:
        command = [sys.executable, "-m", "tests.support.device_side", name, str(epoch), device]
        self._process = subprocess.Popen(
            [*command, str(tokens), transports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._place: str | None = None
        self._name, self._begin = f"{name}-{epoch}", time.monotonic()

    @property
    def place(self) -> str:
        """Its endpoint; waits until it has started."""
        if self._place is None:
            self._place = str(self.hear())
        return self._place

    def ask(self, *words: object) -> object:
        self.tell(*words)
        return self.hear()

    def tell(self, *words: object) -> None:
        assert self.place and self._process.stdin is not None
        self._log(f"told to {words[0]}")
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> object:
        """Its next answer.

        Raises:
            AssertionError: it ended, or said nothing for `PATIENCE_S` and was killed.
        """
        assert self._process.stdout is not None
        late = threading.Timer(PATIENCE_S, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("> "):
                    self._log(f"answers {line[2:].strip()[:80]}")
                    return json.loads(line[2:])
        finally:
            late.cancel()
        told = f"{self._name} ended with {self._process.wait()}"
        raise AssertionError(f"{told}; it has {PATIENCE_S:.0f} s for an answer")

    def kill(self) -> None:
        self._log("killed")
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _log(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:7.2f} s {self._name}: {what}", flush=True)


if __name__ == "__main__":
    main()
