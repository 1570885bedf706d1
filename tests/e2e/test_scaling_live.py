"""Scaling for real, on this machine: load rises, replicas follow, load falls, replicas drain away.

Then nobody shows pictures, the encoder sleeps, and the next picture wakes it.

Test settings: two seconds up, five down. Nobody who asked may be left without a whole answer.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import data_uri, encoded
from tests.support.processes import ROOT, eventually
from tests.support.serving import serving

pytestmark = pytest.mark.slow
STAGES = ("encoder", "prefill", "decode")
TABLES = {
    "model": {"path": str(ROOT / "checkpoints/nano")},
    "server": {"drain_s": 20.0},
    "decode": {"slots": 4, "max_batch": 4},
    "scaling": {
        "enabled": True,
        "budget": 6,
        "encoder_min": 0,
        "encoder_max": 2,
        "prefill_max": 2,
        "decode_max": 2,
        # Three rooms, their clients and Ray share two cores: half a core is a lot here.
        "low": 0.1,
        "aim": 0.2,
        "high": 0.3,
        "up_s": 2.0,
        "down_s": 5.0,
        "window_s": 4.0,
    },
}


@dataclass
class Crowd:
    """Clients that ask one question after the other until told to stop."""

    url: str
    over: threading.Event = field(default_factory=threading.Event)
    outcomes: Counter = field(default_factory=Counter)
    threads: list[threading.Thread] = field(default_factory=list)

    def come(self, count: int) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._ask, args=(number,))
            thread.start()
            self.threads.append(thread)

    def leave(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(90)

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self.over.is_set():
                reply = client.post("/v1/chat/completions", json=question(number, chance))
                told = reply.json()
                reason = told["choices"][0]["finish_reason"] if reply.is_success else str(told)
                self.outcomes[reason] += 1


def question(number: int, chance: random.Random) -> dict[str, object]:
    """Most of them show pictures nobody has seen; all have a prompt of their own.

    Answers are short: while long ones hold all slots nobody shows a picture, and an encoder that
    had nothing to do for five seconds goes, as it should.
    """
    words = " ".join(chance.choice(["red", "blue", "circle", "left"]) for _ in range(60))
    content: list[dict[str, object]] = [{"type": "text", "text": words}]
    for _ in range(2 if number % 4 else 0):
        noise = np.random.default_rng(chance.getrandbits(32)).integers(0, 255, (448, 448, 3))
        picture = data_uri(encoded(Image.fromarray(noise.astype("uint8"))))
        content.insert(0, {"type": "image_url", "image_url": {"url": picture}})
    message = {"role": "user", "content": content}
    return {"model": "nano-k3", "messages": [message], "max_tokens": 16, "ignore_eos": True}


def counted(admin_url: str, metric: str) -> dict[str, int]:
    """A gauge of the router's by stage."""
    text = httpx.get(f"{admin_url}/metrics", timeout=10).text
    found = re.findall(rf'^{metric}{{.*stage="(\w+)".*}} (.+)$', text, re.M)
    return {stage: int(float(value)) for stage, value in found if stage in STAGES}


@dataclass
class Watch:
    """Replicas that routers hear of, by stage, as they change: seconds since the start, counts."""

    admin_url: str
    began: float = field(default_factory=time.monotonic)
    rows: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def now(self) -> dict[str, int]:
        found = counted(self.admin_url, "baton_replicas")
        if not self.rows or self.rows[-1][1] != found:
            self.rows.append((round(time.monotonic() - self.began, 1), found))
        return found

    def wait(self, claim: Callable[[], bool], what: str, within_s: float) -> float:
        """Seconds until `claim()` holds."""
        began = time.monotonic()
        try:
            eventually(claim, within_s=within_s, every_s=0.2)
        except AssertionError:
            targets = counted(self.admin_url, "baton_scaling_target")
            raise AssertionError(f"{what} never came; targets {targets}; {self.rows}") from None
        return round(time.monotonic() - began, 1)

    def are(self, encoder: int, prefill: int, decode: int) -> bool:
        return self.now() == {"encoder": encoder, "prefill": prefill, "decode": decode}

    def all_were(self, count: int) -> bool:
        """Whether each stage has had so many, at one time or another."""
        self.now()
        return all(any(row[s] == count for _, row in self.rows) for s in STAGES)


def test_replicas_follow_the_load_and_the_encoder_sleeps_and_wakes_and_no_request_is_lost(
    tmp_path, record_property
):
    with serving(tmp_path, TABLES) as server:
        watch = Watch(server.admin_url)
        assert watch.now() == dict.fromkeys(STAGES, 1)
        crowd = Crowd(server.url)
        crowd.come(8)
        try:
            up_s = watch.wait(lambda: watch.all_were(2), "two of each", within_s=90)
            end = time.monotonic() + 5  # with all of them at work
            while time.monotonic() < end:
                watch.now()
                time.sleep(0.2)
        finally:
            crowd.leave()
        down_s = watch.wait(lambda: watch.are(0, 1, 1), "one of each", within_s=60)
        eventually(lambda: nothing_held(server.admin_url), within_s=10)
        asked = time.monotonic()
        woken = httpx.post(
            f"{server.url}/v1/chat/completions", json=question(1, random.Random(99)), timeout=60
        )
        wake_s = round(time.monotonic() - asked, 1)
        assert watch.now()["encoder"] == 1
        figures = {
            "up_s": up_s,
            "down_s": down_s,
            "wake_s": wake_s,
            "answers": dict(crowd.outcomes),
            "replicas": watch.rows,
        }
        print(f"scaling run: {figures}")
        record_property("scaling", figures)
        assert woken.json()["choices"][0]["finish_reason"] == "length", woken.text
        assert set(crowd.outcomes) == {"length"} and crowd.outcomes["length"] >= 20


def nothing_held(admin_url: str) -> bool:
    told = httpx.get(f"{admin_url}/admin/inventory", timeout=10).json()["replicas"]
    return not any(row[k] for row in told for k in ("pages", "slots", "embeddings", "tickets"))
