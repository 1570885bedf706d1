"""Encoder and prefill processes that die or stop under a request: its answer is made elsewhere."""

from __future__ import annotations

import asyncio
import signal

from router.ledger import Ledger
from tests.support.fleet import Fleet, fleet
from tests.support.processes import Process, write_settings
from tests.support.prompts import image, question

TABLES = {
    "server": {"port": 0, "admin_port": 0},
    "router": {"heartbeat_s": 0.2, "silent_s": 1.5, "probe_s": 60.0},
}
ASK = {"max_tokens": 8, "temperature": 1.0, "seed": 4, "images": [image()], "offsets": [40]}
SOON_S = 20.0


async def answer(running: Fleet) -> list[int]:
    return (await asyncio.wait_for(running.run(running.task(question(1), **ASK)), SOON_S)).ids()


def first(running: Fleet, room: str) -> Process:
    """The process that the next request will go to, all being idle."""
    if room == "prefill":
        return min(running.of(room), key=lambda process: process.place["id"])
    from router.placement import choose_encoder  # by the picture's digest

    candidates = running.house.seen("encoder")[0]
    return running.process(choose_encoder([image()[0].digest], candidates) or "")


async def test_lost_encoders_and_prefills_cost_a_pass_and_no_answer(tmp_path, monkeypatch):
    path = write_settings(tmp_path / "settings.toml", TABLES)
    async with fleet(path, encoder=2, prefill=2) as running:
        whole = await answer(running)
        for room in ("encoder", "prefill"):
            await stopped_while_it_has_the_job(running, room, whole)
        await stopped_after_its_ticket(running, whole, monkeypatch)
        for room in ("encoder", "prefill"):
            await killed_while_it_has_the_job(running, room, whole)
        await running.nothing_left()
        counted = running.house.tally.snapshot()
        assert counted['baton_replays_total{died="encoder"}'] == 3
        assert counted['baton_replays_total{died="prefill"}'] == 2


async def stopped_while_it_has_the_job(running: Fleet, room: str, whole: list[int]) -> None:
    """Silence is what ends the wait; afterwards it goes on as if it had not been away."""
    process = first(running, room)
    process.signal(signal.SIGSTOP)
    assert await answer(running) == whole
    process.signal(signal.SIGCONT)
    await running.ready()


async def stopped_after_its_ticket(running: Fleet, whole: list[int], monkeypatch) -> None:
    """The encoder stops between its ticket and prefill's READ: prefill gives up and says whose."""
    hold, stopped = Ledger.hold, []

    def held(ledger: Ledger, replica, nonce: bytes) -> None:
        hold(ledger, replica, nonce)
        if replica.room == "encoder" and not stopped:
            stopped.append(running.process(replica.id))
            stopped[0].signal(signal.SIGSTOP)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "hold", held)
        assert await answer(running) == whole
    stopped[0].signal(signal.SIGCONT)
    await running.ready()


async def killed_while_it_has_the_job(running: Fleet, room: str, whole: list[int]) -> None:
    process = first(running, room)
    process.signal(signal.SIGSTOP)  # so that it surely still has it when it is killed
    asked = asyncio.create_task(answer(running))
    await asyncio.sleep(0.4)
    await running.kill(process)
    assert await asked == whole
