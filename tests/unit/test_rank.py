"""A rank answers its leader before it serves: recording takes longer than silence may."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import torch

from common.runtime import rank as module
from common.runtime.group import Channel
from common.runtime.orders import Ping, Pong
from common.runtime.rank import Rank


def test_a_rank_that_still_records_is_not_silent(monkeypatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "os", SimpleNamespace(_exit=ended.append))
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Channel(socket.create_connection(server.getsockname()))
        there = Channel(server.accept()[0])
    pages = SimpleNamespace(device=torch.device("cpu"))
    memory = SimpleNamespace(latents=SimpleNamespace(pages=pages))
    receiver = SimpleNamespace(quarantined=2, must_restart=True, sweep=lambda: None)
    Rank(memory, receiver, here, None).listen()
    there.patience(10.0)
    there.send(Ping())
    assert there.receive() == Pong(quarantined=2, is_full=True)
    there.close()
    until = time.monotonic() + 10
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    here.close()
    assert ended == [3]
