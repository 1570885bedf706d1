"""Changes of bytes on the way, planted in real rooms of this process."""

from __future__ import annotations

import torch

from common.contract.regions import Span
from tests.support.relay import Relay

KINDS = {
    "one layer's state": "digest:state:2",
    "one page": "digest:latent:3",
    "the previous request's state": "digest:state:0",
    "embedding row": "digest:embed:0",
}


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
