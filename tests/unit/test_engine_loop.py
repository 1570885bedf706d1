"""The one thread of a room: whatever is posted is run, or its loss is told."""

from __future__ import annotations

import threading

import pytest

from common.errors import RoomLost
from common.runtime.loop import EngineLoop


class Gone(Exception):
    """A fault nobody planned for."""


def failing() -> tuple[EngineLoop, threading.Event]:
    """A loop that fails at its first step, which begins when the event is set."""
    begin = threading.Event()

    def step() -> bool:
        begin.wait(5)
        raise Gone("a fault")

    return EngineLoop("test", step), begin


def test_what_was_posted_to_a_loop_that_fails_is_told_its_loss():
    loop, begin = failing()
    loop.start()
    answer = loop.ask(lambda: "never")
    begin.set()
    with pytest.raises(RoomLost, match="a fault"):
        answer.result(5)


def test_what_is_posted_after_the_failure_is_told_its_loss_at_once():
    loop, begin = failing()
    loop.start()
    begin.set()
    loop._thread.join(5)
    lost = []
    loop.post(lambda: lost.append("run"), lost.append)
    assert [type(error) for error in lost] == [RoomLost]
    with pytest.raises(RoomLost):
        loop.ask(lambda: "never").result(0)


def test_the_room_hears_of_a_failure_before_those_who_wait():
    loop, begin = failing()
    heard = []
    loop.on_failure(lambda error: heard.append("engine"))
    loop.on_failure(lambda error: heard.append("room"))
    loop.start()
    loop.post(lambda: heard.append("run"), lambda error: heard.append("waiting"))
    begin.set()
    loop._thread.join(5)
    assert heard[-3:] == ["room", "engine", "waiting"] or heard == ["run", "room", "engine"]


def test_a_loop_told_to_stop_ends_what_waits_for_it():
    loop = EngineLoop("test", lambda: False)
    loop.start()
    loop.stop()
    with pytest.raises(RoomLost):
        loop.ask(lambda: "never").result(0)


def test_what_a_loop_is_started_with_runs_in_its_thread_before_anything_posted():
    loop = EngineLoop("test", lambda: False)
    seen: list[str] = []
    loop.post(lambda: seen.append("posted"))
    loop.start(lambda: seen.append(threading.current_thread().name))
    loop.ask(lambda: None).result(5)
    loop.stop()
    assert seen == ["test", "posted"]
