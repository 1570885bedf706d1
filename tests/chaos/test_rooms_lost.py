"""Encoder and prefill processes that die or stop under a request: its answer is made elsewhere."""

from __future__ import annotations

import asyncio
import signal

import pytest

from common.contract.messages import EncodeJob, PrefillJob
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


class Stopper:
    """Stops the process that a journey asks for this kind of work, right before it is asked."""

    def __init__(self, running: Fleet, monkeypatch, kind: type) -> None:
        self.stopped: Process | None = None
        ask = Ledger.ask

        async def asked(ledger: Ledger, replica, name: str, message):
            if self.stopped is None and isinstance(message, kind) and not message.probe:
                self.stopped = running.process(replica.id)
                self.stopped.signal(signal.SIGSTOP)
            return await ask(ledger, replica, name, message)

        monkeypatch.setattr(Ledger, "ask", asked)


@pytest.mark.slow
async def test_lost_encoders_and_prefills_cost_a_pass_and_no_answer(tmp_path, monkeypatch):
    path = write_settings(tmp_path / "settings.toml", TABLES)
    async with fleet(path, encoder=2, prefill=2) as running:
        whole = await answer(running)
        for kind in (EncodeJob, PrefillJob):
            await stopped_while_it_has_the_job(running, kind, whole, monkeypatch)
        await stopped_after_its_ticket(running, whole, monkeypatch)
        for kind in (EncodeJob, PrefillJob):
            await killed_while_it_has_the_job(running, kind, whole, monkeypatch)
        await running.nothing_left()
        counted = running.house.tally.snapshot()
        assert counted['baton_replays_total{died="encoder"}'] == 3
        assert counted['baton_replays_total{died="prefill"}'] == 2


async def stopped_while_it_has_the_job(running, kind, whole: list[int], monkeypatch) -> None:
    """Silence is what ends the wait; afterwards it goes on as if it had not been away."""
    with monkeypatch.context() as patched:
        stopper = Stopper(running, patched, kind)
        assert await answer(running) == whole
    assert stopper.stopped is not None
    stopper.stopped.signal(signal.SIGCONT)
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


async def killed_while_it_has_the_job(running, kind, whole: list[int], monkeypatch) -> None:
    with monkeypatch.context() as patched:
        stopper = Stopper(running, patched, kind)  # so that it surely still has it when it dies
        asked = asyncio.create_task(answer(running))
        async with asyncio.timeout(10):
            while stopper.stopped is None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await running.kill(stopper.stopped)
        assert await asked == whole
