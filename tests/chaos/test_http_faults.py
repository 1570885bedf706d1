"""The HTTP cases that need a fault in a room: what their clients are told, and that nothing stays.

O-22b, O-26a, O-26b, O-26c and O-28c of `tests/data/http_cases.jsonl`, against real rooms.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time

import pytest
import pytest_asyncio

from common.config.settings import Settings
from tests.support.behind_http import Site, behind_http
from tests.support.cases import Answer
from tests.support.checks import Run, error_body
from tests.support.golden import NANO
from tests.support.harm import KINDS, Harm
from tests.support.processes import Process, eventually, rooms, write_settings
from tests.support.relay import changed

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SETTINGS = changed(
    Settings(),
    model={"path": str(NANO)},
    server={"port": 0, "admin_port": 0, "drain_s": 1.0},
    router={"heartbeat_s": 0.2, "silent_s": 5.0, "probe_s": 600.0},
    prefill={"pages": 256},
    decode={"pages": 256},
)
SHORT = {"messages": [{"role": "user", "content": "word " * 300}]}  # the cases have 2,000
STORY = {  # an answer that goes on until somebody ends it
    "messages": [{"role": "user", "content": "long story"}],
    "ignore_eos": True,
    "min_tokens": 3000,
    "max_tokens": 3000,
}


def told(site: Site, name: str, answer: Answer) -> str:
    """The code of an error that has the right shape."""
    error_body(Run(site.runner, site.runner.cases[name], answer))
    return answer.json["error"]["code"]


def said(answer: Answer) -> tuple:
    assert answer.status == 200, answer.text
    choice = answer.choice()
    return choice.same(), [round(entry["logprob"], 3) for entry in choice.logprobs]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site():
    async with behind_http(SETTINGS, encoder=1) as site:
        site.readiness._due_at = lambda pair: float("inf")  # a probe could take a fault for itself
        yield site


@pytest.mark.parametrize("side", ["receiver", "producer"])
async def test_a_refused_hand_off_is_prefilled_again_and_then_503(site: Site, side: str):
    """O-26a; the issue has it so, where the case would let the first refusal through."""
    body = site.body("O-26a", temperature=0, logprobs=True)
    whole = said(await site.ask(CHAT, body))
    before = site.house.tally.snapshot().get("baton_reprefills_total", 0)
    harm = Harm(next(iter(KINDS)), side)
    harm.plant(site)
    harm.left = 1
    assert said(await site.ask(CHAT, body)) == whole
    assert site.house.tally.snapshot()["baton_reprefills_total"] == before + 1
    harm.left = 2
    for stream in (False, True):
        answer = await site.ask(CHAT, body | {"stream": stream})
        await site.empty(within_s=2.0)  # far less than a lease
        if stream:  # its room had place, so the stream had begun
            assert answer.chunks[-1]["error"]["code"] == "handoff_refused"
            assert "[DONE]" not in answer.text
        else:
            assert (answer.status, told(site, "O-26a", answer)) == (503, "handoff_refused")
            assert int(answer.headers["Retry-After"]) >= 1
        harm.left = 2
    harm.left = 0
    assert said(await site.ask(CHAT, body)) == whole


@pytest.mark.parametrize(
    ("room", "kind"), [("decode", "Reserve"), ("prefill", "PrefillJob"), ("decode", "DecodeJob")]
)
async def test_what_was_aborted_before_changes_nothing(site: Site, room: str, kind: str):
    """O-22b: aborted in prefill and in the hand-off; in decode below."""
    body = site.body("O-22b")
    whole = said(await site.ask(TEXT, body))
    served = getattr(site, f"{room}s")[0].room
    kept = dict(served._handlers)
    here = next(known for known in kept if known.__name__ == kind)
    for _ in range(4):  # more than once, so that slots are used again
        reached = asyncio.Event()

        async def at_work(message, caller, reached=reached):
            reached.set()
            return await kept[here](message, caller)

        served._handlers[here] = at_work
        try:
            sending = asyncio.create_task(site.ask(CHAT, STORY))
            await asyncio.wait_for(reached.wait(), 10)
        finally:
            served._handlers.update(kept)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        assert said(await site.ask(TEXT, body)) == whole
    await site.empty()


async def test_what_was_aborted_in_decode_changes_nothing(site: Site):
    """O-22b."""
    body = site.body("O-22b")
    whole = said(await site.ask(TEXT, body))
    for count in (2, 9):
        async with site.client.stream(
            "POST", CHAT, json={"model": site.model, "stream": True} | STORY
        ) as reply:
            lines = reply.aiter_lines()
            while count:
                count -= (await anext(lines)).startswith("data: ")
        assert said(await site.ask(TEXT, body)) == whole
    await site.empty()


async def test_a_client_that_leaves_while_bytes_are_checked_hands_them_to_nobody(site: Site):
    """O-26b, its half behind the READ: the completion comes when nobody waits for it any more."""
    body = {"temperature": 0, "logprobs": True, "max_tokens": 6}
    body, other = (
        body | {"messages": [{"role": "user", "content": word * 200}]} for word in ("word ", "sun ")
    )
    whole = [said(await site.ask(CHAT, one)) for one in (body, other)]
    arrived, go_on = threading.Event(), threading.Event()
    intake = site.decodes[0].intake

    def late(*_: object) -> None:
        intake.tamper = None
        arrived.set()
        go_on.wait(20)

    intake.tamper = late
    sending = asyncio.create_task(site.ask(CHAT, body))
    assert await asyncio.to_thread(arrived.wait, 20)
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    assert said(await site.ask(CHAT, other)) == whole[1]
    go_on.set()
    await site.empty(within_s=2.0)
    assert said(await site.ask(CHAT, body)) == whole[0]


async def test_full_queues_give_429_at_once():
    """O-28c; the issue has 429 where the case leaves a choice."""
    settings = changed(SETTINGS, router={"queue_limit": 1}, decode={"slots": 2})
    async with behind_http(settings) as site, asyncio.TaskGroup() as group:
        holding = [group.create_task(site.ask(CHAT, STORY)) for _ in range(3)]
        while len(site.house.admission) < 1:
            await asyncio.sleep(0.01)
        for stream in (False, True):
            began = time.monotonic()
            answer = await site.ask(CHAT, site.body("O-28c", stream=stream))
            assert time.monotonic() - began < 2.0
            assert (answer.status, told(site, "O-28c", answer)) == (429, "at_capacity")
            assert int(answer.headers["Retry-After"]) >= 1
            assert "wait already" in answer.json["error"]["message"]
        for task in holding:
            task.cancel()
        await site.empty()
        assert (await site.ask(CHAT, site.body("O-28c"))).status == 200


class Striker:
    """Sends a signal to whatever process a decode room is about to pull from, so many times."""

    def __init__(self, site: Site, producers: list[Process]) -> None:
        self._producers = producers
        self.left, self.number, self.struck = 0, signal.SIGSTOP, list[Process]()
        self.reached = asyncio.Event()
        decode, self._loop = site.decodes[0], asyncio.get_running_loop()
        for at, name in ((decode.room.peers, "claim"), (decode.link, "read")):
            setattr(at, name, self._at(name, getattr(at, name)))
        self.moment = "read"

    def _at(self, name, go_on):
        def struck(peer, *more):
            if name == self.moment and self.left:
                self.left -= 1
                process = next(p for p in self._producers if p.place["id"] == peer.id)
                process.signal(self.number)
                self.struck.append(process)
                self._loop.call_soon_threadsafe(self.reached.set)
            return go_on(peer, *more)

        return struck

    def strike(self, moment: str, times: int, number: int = signal.SIGSTOP) -> None:
        self.moment, self.left, self.number = moment, times, number
        self.reached.clear()

    def resume(self) -> None:
        for process in self.struck:
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
        self.struck.clear()


@pytest.mark.slow
async def test_a_transfer_that_hangs_or_dies_is_made_again_or_told(tmp_path):
    """O-26b and O-26c: producers that stop before the READ or in it, and one that dies."""
    tables = {
        "model": {"path": str(NANO), "dtype": "float32"},
        "server": {"port": 0, "admin_port": 0},
        "transfer": {"transports": "tcp", "deadline_s": 1.0},
    }
    settings = changed(
        SETTINGS,
        transfer={"transports": "tcp", "deadline_s": 1.0},
        router={"silent_s": 20.0},  # the READ's own deadline must find it, not the heartbeat
    )
    path = write_settings(tmp_path / "settings.toml", tables)
    with rooms(path, prefill=2, decode=0) as producers:
        async with behind_http(settings, prefill=0, beside=producers) as site:
            while len(site.house.seen("prefill")[0]) < 2:
                await asyncio.sleep(0.02)
            striker = Striker(site, producers)
            try:
                await hang_and_die(site, striker)
            finally:
                striker.resume()


async def hang_and_die(site: Site, striker: Striker) -> None:
    body = SHORT | {"max_tokens": 8, "temperature": 0, "logprobs": True}
    whole = said(await site.ask(CHAT, body))
    for moment in ("claim", "read"):
        striker.strike(moment, times=1)
        assert said(await site.ask(CHAT, body)) == whole  # on the other producer
        striker.resume()
        await site.empty()
    for moment, code in (("claim", "room_lost"), ("read", "transfer_failed")):
        striker.strike(moment, times=2)
        began = time.monotonic()
        answer = await site.ask(CHAT, body)
        assert (answer.status, told(site, "O-26c", answer)) == (503, code)
        assert time.monotonic() - began < 20.0  # two prompts and two deadlines of a transfer
        striker.resume()
        await site.empty()
    await leave_in_the_transfer(site, striker, whole)
    striker.strike("read", times=1, number=signal.SIGKILL)
    assert said(await site.ask(CHAT, body)) == whole
    dead = {f"{striker.struck[0].place['id']} is silent": 1}
    await asyncio.to_thread(eventually, lambda: site.runner.holdings() == dead, within_s=10)


async def leave_in_the_transfer(site: Site, striker: Striker, whole: tuple) -> None:
    """The client leaves while the READ hangs; another request comes; then the late bytes do."""
    striker.strike("read", times=1)
    sending = asyncio.create_task(site.ask(CHAT, site.body("O-26b") | SHORT))
    await asyncio.wait_for(striker.reached.wait(), 20)
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    body = SHORT | {"max_tokens": 8, "temperature": 0, "logprobs": True}
    next_one = asyncio.create_task(site.ask(CHAT, body))
    await asyncio.sleep(0.1)
    striker.resume()
    assert said(await next_one) == whole
    await site.empty()
