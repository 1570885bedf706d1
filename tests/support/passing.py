"""A prefill pass that stands still at a layer, and what decode pulled of it by then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from services.decode.held import Held
from services.prefill.early import Passing
from tests.support.relay import Relay

END = -1  # behind the last layer, when everything was launched


class Stop:
    """Holds passes behind a layer until told to go on; `reached` says that one stands there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
        self.layer = layer
        self.reached, self._go_on = threading.Event(), threading.Event()
        after, end = Passing.after, Passing.end

        def stop_after(passing: Passing, number: int) -> None:
            after(passing, number)
            self.wait(number)

        def stop_at_end(passing: Passing) -> None:
            end(passing)
            self.wait(END)

        monkeypatch.setattr(Passing, "after", stop_after)
        monkeypatch.setattr(Passing, "end", stop_at_end)

    def wait(self, number: int) -> None:
        if number == self.layer:
            self.reached.set()
            assert self._go_on.wait(60), "nobody let the pass go on"

    def go_on(self) -> None:
        self._go_on.set()

    def again(self) -> None:
        """Hold the next pass too."""
        self.reached.clear()
        self._go_on.clear()


class Pulled:
    """Sees each piece of a pull as it lands, before it is digested."""

    def __init__(self, relay: Relay) -> None:
        self.intake = relay.decodes[0].intake
        self.pieces: list[list[tuple[str, int, int]]] = []  # (kind, low, high) of each, as landed
        self.hurt: Callable[[Held, list[tuple[str, int, int]]], None] = lambda held, piece: None
        pull, landing_of = self.intake.pull, self.intake._landing
        held_now = threading.local()

        def seen_pull(held, *more):
            held_now.held = held
            return pull(held, *more)

        def seen_landing(*arguments):
            landing, held = landing_of(*arguments), held_now.held
            digest = landing.landed

            def landed(number: int) -> None:
                stretches = landing._stretches
                piece = [(stretches[at].kind, low, high) for at, low, high in landing._cuts[number]]
                self.pieces.append(piece)
                self.hurt(held, piece)
                digest(number)

            landing.landed = landed
            return landing

        self.intake.pull, self.intake._landing = seen_pull, seen_landing

    def layers(self) -> int:
        """Layers of the slot that are here."""
        return max(
            (high for piece in self.pieces for kind, _, high in piece if kind == "state"), default=0
        )


async def until(claim: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not claim():
            await asyncio.sleep(0.01)
