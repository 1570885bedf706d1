"""A side that dies in mid-READ or in mid-step: the other's memory, graphs and agent stay sound.

On a device a request of 14 GB is read, which takes longer than a signal; with two devices each side
has its own. The CPU's twin goes over tcp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.support.device_side import Other

pytestmark = pytest.mark.slow
CPU, GPU = (256, 1 << 20), (500_000, 1 << 30)  # tokens and bytes of a piece
SOUND = {"memory": True, "step": True}


@dataclass
class Line:
    """Starts sides, the second kind on the last device."""

    device: str
    tokens: int
    piece_bytes: int
    made: list[Other]

    def start(self, name: str, epoch: int) -> Other:
        device, over = "cpu", "tcp"
        if self.device == "cuda":
            last = torch.cuda.device_count() - 1
            device, over = f"cuda:{min(1, last) if name == 'decode' else 0}", ""
        self.made.append(Other(name, epoch, device, self.tokens, over))
        return self.made[-1]

    def pull(self, decode: Other, prefill: Other, while_read: Callable[[], None] = bool) -> object:
        signed = json.dumps(prefill.ask("sign"), separators=(",", ":"))
        decode.tell("pull", prefill.place, signed, self.piece_bytes)
        assert decode.hear() == "landed"
        while_read()
        return decode.hear()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    tokens, piece_bytes = CPU if request.param == "cpu" else GPU
    line = Line(request.param, tokens, piece_bytes, [])
    yield line
    for side in line.made:
        side.close()


VERIFIED = {"told": "verified", "freed": 1, "quarantined": 0}


def test_a_prefill_killed_in_mid_read_leaves_decode_sound_for_its_successor(line):
    decode = line.start("decode", 7)
    for epoch in range(1, 6):
        prefill = line.start("prefill", epoch)
        assert line.pull(decode, prefill) == VERIFIED
        came_to = line.pull(decode, prefill, prefill.kill)
        assert decode.ask("sound") == SOUND
        if came_to != VERIFIED:  # otherwise the READ was over before the signal
            break
    assert came_to == {"told": "transfer_failed", "freed": 1, "quarantined": 0}
    again = line.start("prefill", epoch + 1)
    assert line.pull(decode, again) == VERIFIED
    assert decode.ask("sound") == SOUND


def test_a_decode_killed_in_mid_step_leaves_prefill_sound_for_another(line):
    prefill, decode = line.start("prefill", 1), line.start("decode", 7)
    assert line.pull(decode, prefill) == VERIFIED
    assert decode.ask("steps") == "stepping"
    decode.kill()
    assert prefill.ask("sound") == SOUND
    second = line.start("decode", 8)
    assert line.pull(second, prefill) == VERIFIED
    signed = json.dumps(prefill.ask("sign"), separators=(",", ":"))
    second.tell("pull", prefill.place, signed, line.piece_bytes)
    assert second.hear() == "landed"
    second.kill()
    assert prefill.ask("sound") == SOUND
    third = line.start("decode", 9)
    assert line.pull(third, prefill) == VERIFIED
