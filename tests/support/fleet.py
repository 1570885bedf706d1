"""Rooms as processes that come and go: killed, stopped, told to leave, replaced; with real probes.

A `Fleet` is a `Relay` whose seats change, as they do under Serve: who is told to leave loses its
seat first, who died keeps it until a new one takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from common.config.loading import load_settings
from common.contract.messages import Load, Ping
from common.errors import ServingError
from router.app import Router
from router.seats import Seat, Seats
from tests.support.processes import SECRET, Process, start
from tests.support.relay import Relay

PRESENT_S = 60.0


@dataclass
class Fleet(Relay):
    """Processes by kind of room, and the router's insides in this process."""

    path: Path = Path()
    url: str = ""
    admin_url: str = ""
    seats: Seats = field(default_factory=Seats)
    processes: list[Process] = field(default_factory=list)
    former: list[Process] = field(default_factory=list)  # dead or leaving

    def of(self, room: str) -> list[Process]:
        return [process for process in self.processes if process.room == room]

    def process(self, id: str) -> Process:
        return next(process for process in self.processes if process.place["id"] == id)

    def busy(self, room: str) -> Process | None:
        """The process that some request waits for now."""
        for replica in self.house.board.present(room):
            if replica.followers or replica.jobs or replica.assigned_tokens:
                with contextlib.suppress(StopIteration):
                    return self.process(replica.id)
        return None

    async def add(self, room: str) -> Process:
        """Start one more and wait until it listens."""
        process = start(f"services.{room}", self.path)
        await asyncio.to_thread(process.wait_listening)
        self.processes.append(process)
        self._fill()
        return process

    async def kill(self, process: Process) -> None:
        """End it without a word; its seat goes when the next table comes."""
        process.signal(signal.SIGKILL)
        await asyncio.to_thread(process.popen.wait)
        self._remove(process)

    def leave(self, process: Process, *, seat_goes: bool = True) -> None:
        """Tell it to leave, as at scale-down; without Serve its seat stays."""
        if seat_goes:
            self._remove(process)
        process.signal(signal.SIGTERM)

    async def replace(self, process: Process) -> Process:
        """A rolling restart's step: first the new one, then the old one leaves."""
        new = await self.add(process.room)
        await self.ready(len(self.processes))
        self.leave(process)
        return new

    async def ready(self, count: int | None = None) -> None:
        """Until so many replicas are present and each pair of text rooms passed its probe."""
        board, pairs = self.house.board, self.house.pairs
        async with asyncio.timeout(PRESENT_S):
            while True:
                wanted = len(self.processes) if count is None else count
                present = [r for r in board.connected() if not r.is_leaving]
                prefills, decodes = self.house.seen("prefill")[0], self.house.seen("decode")[0]
                whole = len(prefills) * len(decodes)
                if len(present) >= wanted and pairs.count_usable(prefills, decodes) == whole > 0:
                    return
                await asyncio.sleep(0.02)

    async def resident_bytes(self) -> dict[str, float]:
        """What each process holds of the machine's memory."""
        found = {}
        for replica in self.house.board.connected():
            with contextlib.suppress(ServingError):
                load = await replica.call(Ping())
                assert isinstance(load, Load)
                found[replica.id] = load.counters["baton_resident_bytes"]
        return found

    def end(self) -> None:
        for process in self.processes + self.former:
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGKILL)
            process.end()

    def _remove(self, process: Process) -> None:
        self.processes.remove(process)
        self.former.append(process)
        self._fill()

    def _fill(self) -> None:
        places = [process.place for process in self.processes]
        seats = [Seat(key=p["id"], host=p["host"], port=p["port"]) for p in places]
        self.seats.fill("line", seats)


def exit_code(process: Process, within_s: float) -> int | None:
    """How it ended; None while it runs."""
    try:
        return process.popen.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


@contextlib.asynccontextmanager
async def fleet(
    path: Path, *, encoder: int = 0, prefill: int = 1, decode: int = 1
) -> AsyncIterator[Fleet]:
    """So many processes of each room behind a router that listens for HTTP in this one.

    All end on the way out; `path` is a deployment file whose ports are 0.
    """
    seats = Seats()
    router = Router(load_settings(path, {}), seats, secret=SECRET, name="test")
    running = Fleet(router.house, path=path, seats=seats)
    await router.start()
    running.url = f"http://127.0.0.1:{router.public.port}"
    running.admin_url = f"http://127.0.0.1:{router.admin.port}"
    try:
        wanted = ["encoder"] * encoder + ["prefill"] * prefill + ["decode"] * decode
        await asyncio.gather(*[running.add(room) for room in wanted])
        await running.ready()
        yield running
    finally:
        await router.stop()
        await asyncio.to_thread(running.end)
