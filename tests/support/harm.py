"""Changes of bytes on the way, planted in real rooms: of this process, or of their own.

A process of its own (`python -m tests.support.harm SETTINGS ROOM`) is told by a file, named in
BATON_TEST_HARM, what to change and how often.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from common.contract.regions import Span
from common.runtime.process import main
from services.decode.room import DecodeRoom
from services.encoder.room import EncoderRoom
from services.prefill.room import PrefillRoom

ORDERS = "BATON_TEST_HARM"
STATE, PAGE, PREVIOUS = "one layer's state", "one page", "the previous request's state"
ROW = "embedding row"
KINDS = {
    STATE: "digest:state:2",
    PAGE: "digest:latent:3",
    PREVIOUS: "digest:state:0",
    ROW: "digest:embed:0",
}
ROOMS = {"encoder": EncoderRoom, "prefill": PrefillRoom, "decode": DecodeRoom}


class Harm:
    """A change of bytes at one side of a hand-off; `left` says how often it will strike."""

    def __init__(self, kind: str = "", side: str = "") -> None:
        self.kind, self.side, self.left = kind, side, 0
        self.previous: torch.Tensor | None = None  # the first state that passed

    def strikes(self, side: str, kind: str) -> bool:
        if (self.side, self.kind) != (side, kind):
            return False
        self.left -= 1
        return self.left >= 0

    def plant(self, relay) -> None:
        for room in (relay.prefills[0], relay.decodes[0], *relay.encoders[:1]):
            self.plant_in(room)

    def plant_in(self, room) -> None:
        if isinstance(room, EncoderRoom):
            after(room.owner, "offer_embeds", self.hurt_embeddings(room))
        elif isinstance(room, PrefillRoom):
            room.puller.tamper = lambda images: (
                self.strikes("receiver", ROW) and images[0][0].zero_()
            )
            after(room.owner, "seal", self.hurt_ticket(room.memory))
        else:
            room.intake.tamper = lambda held, memory: self.hurt(
                "receiver", memory, held.slots[0], held.prompt_pages[0]
            )

    def hurt_embeddings(self, encoder):
        def hurt(ticket) -> None:
            if self.strikes("producer", ROW):
                start = ticket.parts[0].span.offset // encoder._arena.row_bytes
                encoder._arena.rows[start].zero_()

        return hurt

    def hurt_ticket(self, memory):
        def place(ticket, kind: str) -> Span:
            return next(part.span for part in ticket.offer.parts if part.kind == kind)

        def hurt(ticket) -> None:
            slot = place(ticket, "state").offset // memory.states.state_bytes
            page = place(ticket, "latent").offset // memory.latents.page_bytes
            self.hurt("producer", memory, slot, page)

        return hurt

    def hurt(self, side: str, memory, slot: int, page: int) -> None:
        state, pages = memory.states.state, memory.latents.pages
        if self.previous is None:
            self.previous = state[slot].clone()
        if self.strikes(side, STATE):
            state[slot, 2].zero_()
        elif self.strikes(side, PAGE):
            pages[page].zero_()
        elif self.strikes(side, PREVIOUS):
            state[slot].copy_(self.previous)
        if state.is_cuda:
            torch.cuda.synchronize()  # digests are taken on another stream


class ToldHarm(Harm):
    """The same, told by a file."""

    def __init__(self, orders: Path) -> None:
        super().__init__()
        self._orders, self._number = orders, 0

    def strikes(self, side: str, kind: str) -> bool:
        told = json.loads(self._orders.read_text())
        if told["number"] != self._number:
            self._number = told["number"]
            self.kind, self.side, self.left = told["kind"], told["side"], told["left"]
        return super().strikes(side, kind)


def tell(orders: Path, number: int, kind: str = "", side: str = "", left: int = 0) -> None:
    """Write an order; each has a number of its own."""
    fresh = orders.with_suffix(".new")
    fresh.write_text(json.dumps({"number": number, "kind": kind, "side": side, "left": left}))
    fresh.replace(orders)


def after(owner, name: str, then) -> None:
    """Let `then` see what a method returned, once it has returned."""
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        result = method(*args, **kwargs)
        then(result)
        return result

    setattr(owner, name, wrapped)


def built(name: str, settings, secret: str, replica: str):
    """A room with the hooks in it."""
    room = ROOMS[name](settings, secret=secret, replica=replica)
    ToldHarm(Path(os.environ[ORDERS])).plant_in(room)
    return room


if __name__ == "__main__":
    path, which = sys.argv[1:3]
    main(lambda *arguments: built(which, *arguments), [path])
