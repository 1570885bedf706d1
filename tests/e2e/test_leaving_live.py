"""Ctrl-C in mid-stream, at the whole process group, as a terminal sends it.

A stream that can end within the drain time ends as ever; one that cannot is told so, and so is who
comes now.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support.processes import ROOT
from tests.support.serving import serving

pytestmark = pytest.mark.slow
NANO = {"path": str(ROOT / "checkpoints/nano")}
LATE = {"prompt": "seven", "max_tokens": 1, "stream": False}
ASK = {"model": "nano-k3", "stream": True, "ignore_eos": True, "temperature": 0}


@dataclass
class Streamed:
    """What one stream said, and its last event."""

    text: str = ""
    last: str = ""


def stream(url: str, path: str, body: dict) -> Streamed:
    """Read it to its end; an answer that is not 200, or breaks off, raises."""
    said = Streamed()
    with httpx.stream("POST", url + path, json=ASK | body, timeout=180) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: "):
                said.last = line.removeprefix("data: ")
                if said.last != "[DONE]":
                    said.text += "".join(
                        choice.get("text", "")
                        for choice in json.loads(said.last).get("choices", ())
                    )
    return said


@dataclass
class Readers:
    """Clients that stream one answer after the other until told to stop."""

    url: str
    bodies: list[tuple[str, dict]]
    over: threading.Event = field(default_factory=threading.Event)
    told: list[tuple[int, Streamed | Exception]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def come(self) -> None:
        for number in range(len(self.bodies)):
            thread = threading.Thread(target=self._read_on, args=(number,))
            thread.start()
            self.threads.append(thread)

    def leave(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(120)

    def _read_on(self, number: int) -> None:
        while not self.over.is_set():
            try:
                self.told.append((number, stream(self.url, *self.bodies[number])))
            except Exception as error:
                self.told.append((number, error))
                return


def test_ctrl_c_lets_streams_end_within_the_drain_time_and_tells_longer_ones(tmp_path):
    tables = {"model": NANO, "server": {"drain_s": 33.0}}  # Serve's own patience is 30 s
    with serving(tmp_path, tables) as server:
        bodies = [
            ("/v1/completions", {"prompt": "one two three", "max_tokens": 300}),
            ("/v1/completions", {"prompt": "four five six", "max_tokens": 7900, "n": 2}),
        ]
        readers = Readers(server.url, bodies)
        readers.come()
        time.sleep(1.0)
        readers.over.set()
        began = time.monotonic()
        os.killpg(server.pid, signal.SIGINT)
        while (late := httpx.post(server.url + bodies[0][0], json=ASK | LATE)).status_code == 200:
            assert time.monotonic() - began < 10
        assert (late.status_code, late.headers["Retry-After"]) == (503, "2")
        readers.leave()
        took_s = time.monotonic() - began
        (short,) = [told for at, told in readers.told if at == 0]
        (long,) = [told for at, told in readers.told if at == 1]
        assert isinstance(short, Streamed) and short.last == "[DONE]"
        assert isinstance(long, Streamed) and json.loads(long.last)["error"]["code"] == "not_ready"
        assert long.text and took_s < 60
        assert server.process.wait(60) == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""  # nothing in red
