"""On a device a portion is final when its kernels have run, however late that is."""

from __future__ import annotations

import time

import pytest
import torch

from services.prefill.early import Passing

pytestmark = pytest.mark.gpu
LATE = 200_000_000  # cycles: about a tenth of a second
LAYERS, BORDERS = (0, 1, 3, 4), (2, 4)  # layer 2 leaves nothing in a slot
WRITTEN = (0, 0, 2, 4, 4)  # layers that are, by the number of portions that are final


class Pass:
    """A pass whose kernels are late, and a look at what they wrote that does not wait for them."""

    def __init__(self) -> None:
        self.states = torch.zeros(len(LAYERS), 1 << 20, device="cuda")
        self.seen = torch.zeros(len(LAYERS), 1).pin_memory()
        self.beside = torch.cuda.Stream()
        self.passing = Passing(layers=LAYERS, borders=BORDERS, device=torch.device("cuda"))

    def launch(self, late: int) -> None:
        torch.cuda._sleep(late)
        self.passing.begin()
        for layer in range(6):
            torch.cuda._sleep(late)
            if layer in LAYERS:
                self.states[LAYERS.index(layer)].fill_(1.0)
            self.passing.after(layer)
        torch.cuda._sleep(late)
        self.passing.end()

    def written(self) -> int:
        with torch.cuda.stream(self.beside):
            self.seen.copy_(self.states[:, -1:], non_blocking=True)
        self.beside.synchronize()
        return int(self.seen.sum())


def test_a_portion_is_final_when_its_kernels_have_run_and_not_when_they_were_launched() -> None:
    first = Pass()  # loads every kernel: loading one may wait for the whole device
    first.launch(1)
    torch.cuda.synchronize()
    assert (first.written(), first.passing.final()) == (4, 4)

    late = Pass()
    torch.cuda.synchronize()
    late.launch(LATE)
    looks, began = [(0.0, late.passing.final(), late.written())], time.monotonic()
    while looks[-1][1] < 4 and time.monotonic() - began < 10:
        time.sleep(0.005)
        final = late.passing.final()
        looks.append((time.monotonic() - began, final, late.written()))
    assert looks[0][1:] == (0, 0), looks[0]  # everything was launched, nothing has run
    assert all(written >= WRITTEN[final] for _, final, written in looks), looks
    assert {0, 1, 2, 3, 4} == {final for _, final, _ in looks}, looks
