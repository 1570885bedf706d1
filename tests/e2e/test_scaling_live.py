"""Scaling for real, on this machine: load rises, replicas follow, load falls, replicas drain away.

Test settings: two seconds up, five down. Nobody who asked may be left without a whole answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from tests.conftest import free_port
from tests.support.pictures import data_uri
from tests.support.processes import ROOT, eventually, write_settings

pytestmark = pytest.mark.slow
STAGES = ("encoder", "prefill", "decode")


@dataclass
class Crowd:
    """Clients that ask one question after the other until told to stop."""

    url: str
    over: threading.Event = field(default_factory=threading.Event)
    outcomes: Counter = field(default_factory=Counter)
    threads: list[threading.Thread] = field(default_factory=list)

    def grow(self, count: int, *, picture: str) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._ask, args=(number, picture))
            thread.start()
            self.threads.append(thread)

    def leave(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)

    def _ask(self, number: int, picture: str) -> None:
        text = "count from one to forty " * (20 + number)
        content = [{"type": "text", "text": text}]
        if number % 2:
            content.insert(0, {"type": "image_url", "image_url": {"url": picture}})
        body = {
            "model": "nano-k3",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 96,
            "ignore_eos": True,
        }
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self.over.is_set():
                reply = client.post("/v1/chat/completions", json=body)
                told = reply.json()
                reason = told["choices"][0]["finish_reason"] if reply.is_success else str(told)
                self.outcomes[reason] += 1
