"""Loss is noticed: bytes changed on the way are refused by name, and would have changed answers.

The hooks change bytes only: in the producer's memory after its ticket was made, or in the
receiver's between the READ's end and verification. Each is run with verification, where it must be
refused every time, and without, where at least one answer must come out wrong.
"""

from __future__ import annotations

import pytest
import torch

from common.config.settings import Settings
from common.contract.regions import Span
from common.errors import HandoffRefused
from tests.support.questions import arguments, referenced
from tests.support.relay import Relay, changed, in_process

PICTURE = ["nano-20001-000", "nano-20001-016"]
BEFORE = "nano-20001-015"  # the request before
TEXT = ["nano-20001-009", "nano-20001-008", "nano-20001-013"]


class Harm:
    """A change of bytes at one side of a hand-off; `left` says how often it will strike."""

    def __init__(self, kind: str, side: str) -> None:
        self.kind, self.side, self.left = kind, side, 0
        self.previous: torch.Tensor | None = None  # the first state that passed

    def strikes(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def plant(self, relay: Relay) -> None:
        prefill, decode, encoder = relay.prefills[0], relay.decodes[0], relay.encoders[0]
        if self.kind == "embedding row" and self.side == "receiver":
            prefill.puller.tamper = lambda images: self.strikes() and images[0][0].zero_()
        elif self.kind == "embedding row":
            after(encoder.owner, "offer_embeds", self.hurt_embeddings(encoder))
        elif self.side == "receiver":
            decode.intake.tamper = lambda held, memory: self.hurt(
                memory, held.slots[0], held.prompt_pages[0]
            )
        else:
            after(prefill.owner, "seal", self.hurt_ticket(prefill))

    def hurt_embeddings(self, encoder):
        def hurt(ticket) -> None:
            if self.strikes():
                start = ticket.parts[0].span.offset // encoder._arena.row_bytes
                encoder._arena.rows[start].zero_()

        return hurt

    def hurt_ticket(self, prefill):
        memory = prefill.memory

        def place(ticket, kind: str) -> Span:
            return next(part.span for part in ticket.offer.parts if part.kind == kind)

        def hurt(ticket) -> None:
            slot = place(ticket, "state").offset // memory.states.state_bytes
            page = place(ticket, "latent").offset // memory.latents.page_bytes
            self.hurt(memory, slot, page)

        return hurt

    def hurt(self, memory, slot: int, page: int) -> None:
        state, pages = memory.states.state, memory.latents.pages
        if self.previous is None:
            self.previous = state[slot].clone()
        if self.kind == "one layer's state" and self.strikes():
            state[slot, 2].zero_()
        elif self.kind == "one page" and self.strikes():
            pages[page].zero_()
        elif self.kind == "the previous request's state" and self.strikes():
            state[slot].copy_(self.previous)


def after(owner, name: str, then) -> None:
    """Let `then` see what a method returned, once it has returned."""
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        result = method(*args, **kwargs)
        then(result)
        return result

    setattr(owner, name, wrapped)


KINDS = {
    "one layer's state": "digest:state:2",
    "one page": "digest:latent:3",
    "the previous request's state": "digest:state:0",
    "embedding row": "digest:embed:0",
}
HARMS = [(kind, side) for kind in KINDS for side in ("producer", "receiver")]


@pytest.mark.parametrize(("kind", "side"), HARMS, ids=[" at ".join(harm) for harm in HARMS])
async def test_changed_bytes_are_refused_by_name_and_prefilled_again(kind, side):
    ids = PICTURE if kind == "embedding row" else TEXT
    async with in_process(Settings(), encoder=1) as relay:
        harm = Harm(kind, side)
        harm.plant(relay)
        await ask(relay, BEFORE)
        harm.left = 2  # refused, prefilled again, refused again
        with pytest.raises(HandoffRefused) as refused:
            await ask(relay, ids[0])
        assert refused.value.part == KINDS[kind]
        await relay.nothing_left()
        harm.left = 1  # refused once: the second hand-off is whole
        for name in ids[1:]:
            assert await ask(relay, name) == right(name)
        await relay.nothing_left()
        assert counted(relay, "baton_handoffs_refused_total") == 3


def right(name: str) -> list[int]:
    return referenced()[name]["reference"]["ids"]


async def ask(relay: Relay, name: str) -> list[int]:
    case = referenced()[name]
    task = relay.task(case["reference"]["prompt_ids"], **arguments(case))
    return (await relay.run(task)).ids()


def counted(relay: Relay, name: str) -> float:
    rooms = [*relay.prefills, *relay.decodes]
    return sum(
        value
        for room in rooms
        for key, value in room.tally.snapshot().items()
        if key.startswith(name)
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_the_same_changes_give_wrong_answers_without_verification(kind):
    settings = changed(Settings(), testing={"verify": False})
    ids = PICTURE if kind == "embedding row" else TEXT
    async with in_process(settings, encoder=1) as relay:
        harm = Harm(kind, "receiver")
        harm.plant(relay)
        await ask(relay, BEFORE)
        harm.left = len(ids)
        wrong = [name for name in ids if await ask(relay, name) != right(name)]
        assert wrong, "the answers survived; the hook proves nothing"
