"""Replicas of two ranks under Ray Serve: they answer, die as one, and come back."""

from __future__ import annotations

import os
import signal

import httpx
import psutil
import pytest

from tests.support.processes import ROOT, eventually
from tests.support.serving import serving

pytestmark = pytest.mark.slow
TABLES = {
    "model": {"path": str(ROOT / "checkpoints/nano")},
    "server": {"drain_s": 2.0},
    "prefill": {"tensor": 2},
    "decode": {"tensor": 2, "expert": 2},
}
QUESTION = {
    "model": "nano-k3",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
    "temperature": 0,
}


def rank_pids(server_pid: int) -> list[int]:
    """Processes of Ray actors that are ranks, by the title Ray gives them."""
    found = []
    for process in psutil.Process(server_pid).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "_Rank" in title:
            found.append(process.pid)
    return found


def answer(url: str) -> str:
    reply = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=60)
    if reply.status_code != 200:
        return ""
    message = reply.json()["choices"][0]["message"]
    return f"{message.get('reasoning_content') or ''}|{message.get('content') or ''}"


def test_a_group_answers_dies_as_one_and_comes_back(tmp_path) -> None:
    with serving(tmp_path, TABLES) as server:
        first = answer(server.url)
        assert len(first) > 1
        for rank in sorted(rank_pids(server.pid)):  # one of either room
            others = set(rank_pids(server.pid))
            assert len(others) == 2
            os.kill(rank, signal.SIGKILL)
            eventually(
                lambda others=others: (
                    len(set(rank_pids(server.pid)) - others) == 1
                    and len(rank_pids(server.pid)) == 2
                ),
                within_s=120,
            )
            assert eventually(lambda: answer(server.url), within_s=120, every_s=0.5) == first
