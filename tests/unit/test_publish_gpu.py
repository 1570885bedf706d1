"""A ticket waits for the last kernel that writes what it offers, however late that kernel is.

Every kernel runs once before the delay: loading one may wait for the whole device, and then nothing
would be late any more. The test says so when that happens, and prints when each step returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from common.contract.messages import PrefillJob, Sampling, Seal
from common.runtime.memory import TextMemory
from services.prefill.publish import Finished, Signer, publish
from tests.support.wire import DTYPE, SPEC, TOKENS

pytestmark = pytest.mark.gpu
LATE = 1_000_000_000  # cycles: about half a second
LATE_MS = 200.0  # at the least, at any clock
NONCE = b"n" * 16


@dataclass
class Clock:
    """When, in milliseconds of the host since the delay began, each step returned."""

    begin: float = field(default_factory=time.perf_counter)

    def tell(self, what: str) -> float:
        at = (time.perf_counter() - self.begin) * 1e3
        print(f"{at:9.3f} ms: {what}")
        return at


@dataclass
class Watching:
    """An owner that looks whether the device was done when it was asked to offer."""

    last: torch.cuda.Event
    clock: Clock
    asked: list[bool] = field(default_factory=list)

    def offer(self, request, parts, on_end, **more):
        self._look("asked to offer")
        return type("Offer", (), {"nonce": NONCE})()

    def seal(self, nonce, seal):
        self._look("asked to seal")
        return seal

    def _look(self, what: str) -> None:
        self.asked.append(self.last.query())
        self.clock.tell(f"{what}; the last kernel was over: {self.asked[-1]}")


class Finishing:
    """A finished prompt whose last kernels can be made late."""

    def __init__(self) -> None:
        self.memory = TextMemory(SPEC, slots=2, pages=4, dtype=DTYPE, device="cuda")
        self.slot, self.pages = 1, (0, 1, 2)
        self.memory.states.begin(self.slot, NONCE, tokens=TOKENS)
        self.memory.latents.open(self.pages)
        self.logits = torch.zeros(SPEC.vocab, device="cuda")
        self.values = torch.randn_like(self.memory.states.state[self.slot])

    def finish(self, token: int, delay: int) -> tuple[torch.cuda.Event, Clock]:
        """The last kernels behind a delay; the last's event, unfinished if the delay is long."""
        start, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        clock = Clock()
        start.record()
        torch.cuda._sleep(delay)
        clock.tell("delay launched")
        self.memory.states.state[self.slot].copy_(self.values)
        clock.tell("state's copy launched")
        self.memory.latents.pages[:3].normal_()
        clock.tell("pages' kernel launched")
        self.logits[token : token + 1].fill_(1.0)
        last.record()
        clock.tell("logits' kernel launched")
        self.start = start
        return last, clock

    def publish(self, last: torch.cuda.Event, clock: Clock) -> tuple[Seal, list[bool]]:
        """Sign the full pages and publish, as the engine does behind the last pass."""
        token_ids = tuple(range(TOKENS))
        job = PrefillJob(
            request="r", token_ids=token_ids, sampling=Sampling(temperature=0), deadline_s=60
        )
        work = Finished(
            job=job,
            nonce=NONCE,
            memory=self.memory,
            slot=self.slot,
            canary_slot=-1,
            pages=self.pages,
            wait_s=0,
            compute_s=0,
        )
        self.memory.latents.sign(self.pages[:2], 0)
        clock.tell("full pages signed")
        owner = Watching(last, clock)
        seal = publish(work, self.logits, Signer(), owner, lambda outcome: None)
        clock.tell("published")
        return seal, owner.asked


def test_an_offer_and_its_seal_wait_for_the_producers_last_kernel() -> None:
    work = Finishing()
    for _ in range(2):  # loads and compiles every kernel, fills the caches of memory
        work.publish(*work.finish(4, delay=1000))
        torch.cuda.synchronize()
    work.logits.zero_()
    torch.cuda.synchronize()

    last, clock = work.finish(5, delay=LATE)
    early = clock.tell("all launched")
    was_late = not last.query()
    seal, asked = work.publish(last, clock)
    torch.cuda.synchronize()
    took = work.start.elapsed_time(last)
    print(f"the device took {took:.1f} ms to the last kernel; the host had launched at {early:.1f}")
    assert took > LATE_MS, "the delay was none"
    assert was_late, "a launch waited for the delay: the test shows nothing about publishing"

    assert asked == [True, True]
    assert seal.first[0].id == 5
    wanted = work.memory.states.sign(work.slot) | work.memory.latents.measure(work.pages, TOKENS)
    assert seal.digests == wanted.sums
    assert torch.equal(work.memory.states.state[work.slot], work.values)
