"""A ticket waits for the last kernel that writes what it offers, however late that kernel is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from common.contract.messages import PrefillJob, Sampling
from common.runtime.memory import TextMemory
from services.prefill.publish import Finished, Signer, publish
from tests.support.wire import DTYPE, SPEC, TOKENS

pytestmark = pytest.mark.gpu
LATE = 1_000_000_000  # cycles: about half a second
NONCE = b"n" * 16


@dataclass
class Watching:
    """An owner that looks whether the device was done when it was asked to offer."""

    last: torch.cuda.Event
    asked: list[bool] = field(default_factory=list)

    def offer(self, request, parts, on_end, **more):
        self.asked.append(self.last.query())
        return type("Offer", (), {"nonce": NONCE})()

    def seal(self, nonce, seal):
        self.asked.append(self.last.query())
        return seal


def test_an_offer_and_its_seal_wait_for_the_producers_last_kernel() -> None:
    memory = TextMemory(SPEC, slots=2, pages=4, dtype=DTYPE, device="cuda")
    slot, pages = 1, (0, 1, 2)
    memory.states.begin(slot, NONCE, tokens=TOKENS)
    memory.latents.open(pages)
    logits = torch.zeros(SPEC.vocab, device="cuda")
    values = torch.randn_like(memory.states.state[slot])
    job = PrefillJob(
        request="r", token_ids=tuple(range(TOKENS)), sampling=Sampling(temperature=0), deadline_s=60
    )
    work = Finished(
        job=job,
        nonce=NONCE,
        memory=memory,
        slot=slot,
        canary_slot=-1,
        pages=pages,
        wait_s=0,
        compute_s=0,
    )
    memory.latents.sign(pages[:2], 0)
    publish(
        work, logits, Signer(), Watching(torch.cuda.Event()), lambda outcome: None
    )  # compiles every kernel
    torch.cuda.synchronize()

    torch.cuda._sleep(LATE)
    memory.states.state[slot].copy_(values)  # the last kernels, behind the delay
    memory.latents.pages[:3].normal_()
    logits[5:6].fill_(1.0)
    last = torch.cuda.Event()
    last.record()
    assert not last.query()
    memory.latents.sign(pages[:2], 0)
    owner = Watching(last)
    seal = publish(work, logits, Signer(), owner, lambda outcome: None)

    assert owner.asked == [True, True]
    assert seal.first[0].id == 5
    torch.cuda.synchronize()
    wanted = memory.states.sign(slot) | memory.latents.measure(pages, TOKENS)
    assert seal.digests == wanted.sums
    assert torch.equal(memory.states.state[slot], values)
