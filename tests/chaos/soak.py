"""Requests and faults, mixed from a seed, against real processes: `python -m tests.chaos.soak`.

Every answer is compared with that of one plain process. Replicas are killed, stopped and
restarted, tickets are taken away from under their reader, clients leave or read slowly. The last
line says what came of it: zeros must stand before "wrong", "without an ending" and "leaked".

Longer than 300 lines because the driver, its faults and its verdict are read as one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.config.loading import load_settings
from common.contract.messages import Cached, CacheTicket, Holdings, Inventory, Ping
from common.errors import ServingError
from router.house import House
from router.journey import Journey
from router.readiness import Readiness
from router.seats import Seat, Seats
from tests.chaos.questions import Author, Question, picture
from tests.support.golden import NANO
from tests.support.processes import SECRET, Process, start, write_settings
from tests.support.relay import Relay

REPLICAS = {"encoder": 1, "prefill": 2, "decode": 2}
AT_ONCE = 4
DEADLINE_S, GRACE_S = 60.0, 15.0
FAULTS = ("kill", "stop", "restart", "refuse")
CLIENTS = ("patient",) * 6 + ("leaves", "slow")


@dataclass
class Tale:
    """What came of a soak."""

    requests: int = 0
    wrong: int = 0
    endless: int = 0
    leaked: int = 0
    replays: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # honest ones, by code
    # (requests so far, MB) of each process as time goes by, by room and process id
    resident: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def last_line(self) -> str:
        return (
            f"soak: {self.requests} requests, {self.wrong} wrong, "
            f"{self.endless} without an ending, {self.leaked} leaked, "
            f"{self.replays} replays, {self.faults.total()} faults"
        )

    def details(self) -> str:
        parts = [f"faults {dict(self.faults)}", f"honest errors {dict(self.errors)}"]
        if slopes := [(slope(seen), name) for name, seen in self.resident.items()]:
            steepest = ", ".join(f"{name} {rise:+.1f}" for rise, name in sorted(slopes)[::-1][:3])
            parts.append(f"resident memory, MB per 1,000 requests, steepest first: {steepest}")
        parts.append(f"{self.requests / max(self.took_s, 1e-9):.1f} requests/s")
        return "; ".join([*parts, *self.notes])


WARM = 3  # first samples of a process that its slope leaves out: pools and caches fill


def slope(seen: list[tuple[int, float]]) -> float:
    """MB per 1,000 requests, by least squares; 0 for a process that was not there for long."""
    points = seen[WARM:]
    if len(points) < 2 * WARM:
        return 0.0
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


class Soak:
    """The rooms, the router's insides, and the hand that breaks them."""

    def __init__(self, settings: Path, seed: int) -> None:
        self._path, self._random = settings, random.Random(seed)
        self._settings = load_settings(settings, {})
        self.seats = Seats()
        self.house = House(self._settings, self.seats, secret=SECRET, name="soak")
        self.relay = Relay(self.house)
        self.processes: list[Process] = []
        self.tale = Tale()
        self._refuse_next = False

    async def __aenter__(self) -> Soak:
        wanted = [room for room, count in REPLICAS.items() for _ in range(count)]
        self.processes = [start(f"services.{room}", self._path) for room in wanted]
        try:
            for process in self.processes:
                await asyncio.to_thread(process.wait_listening)
        except RuntimeError:
            for process in self.processes:
                process.end()
            raise
        self._fill()
        self.house.start()
        self._readiness = Readiness(self.house, context=4096)
        self._prober = asyncio.create_task(self._readiness.run())
        self._twist_ledger()
        await self._until_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._prober.cancel()
        await self.house.stop()
        for process in self.processes:
            await asyncio.to_thread(process.end)

    # --- requests

    async def run(self, questions: list[Question], number: int, faults: int) -> Tale:
        """Ask `number` questions, a few at a time, with so many faults spread among them."""
        at, began = sorted(self._random.sample(range(2, number), faults)), time.monotonic()
        gate = asyncio.Semaphore(AT_ONCE)
        tasks: list[asyncio.Task[None]] = []
        trouble = asyncio.create_task(asyncio.sleep(0))
        for index in range(number):
            await gate.acquire()
            if index in at:
                await trouble
                trouble = asyncio.create_task(self._break(self._random.choice(FAULTS)))
            question, client = self._random.choice(questions), self._random.choice(CLIENTS)
            task = asyncio.create_task(self._ask(question, client, self._random.random()))
            task.add_done_callback(lambda _: gate.release())
            tasks.append(task)
            if index % max(1, number // 40) == 0:
                self._note_resident(index)
        await asyncio.gather(*tasks, trouble)
        self.tale.took_s = time.monotonic() - began
        await self._count_leaks()
        counters = self.house.tally.snapshot()
        self.tale.replays = int(sum(v for k, v in counters.items() if "replays_total" in k))
        return self.tale

    async def _ask(self, question: Question, client: str, share: float) -> None:
        images = {"images": [picture()], "offsets": [question.image_at]}
        task = self.relay.task(
            question.ids,
            deadline_s=DEADLINE_S,
            canary=question.canary,
            **(images if question.image_at >= 0 else {}),
            temperature=question.sampling.temperature,
            seed=question.sampling.seed,
            max_tokens=question.sampling.max_tokens,
            n=question.sampling.n,
            logprobs=None,
        )
        self.tale.requests += 1
        got: list[list[int]] = [[] for _ in question.answers]
        leave_at = int(share * question.sampling.max_tokens) if client == "leaves" else None
        try:
            async with asyncio.timeout(DEADLINE_S + GRACE_S):
                whole = await self._read(task, got, client, leave_at)
        except ServingError as error:
            self.tale.errors[error.code] += 1
            whole = False
        except TimeoutError:
            self.tale.endless += 1
            return
        for tokens, answer in zip(got, question.answers, strict=True):
            if tuple(tokens) != (answer if whole else answer[: len(tokens)]):
                self.tale.wrong += 1
                self.tale.notes.append(f"{task.request}: {tokens} instead of {list(answer)}")

    async def _read(self, task, got, client: str, leave_at: int | None) -> bool:
        async with Journey(task, self.house) as journey:
            async for item in journey.events():
                got[item.choice] += [token.id for token in item.tokens]
                if leave_at is not None and len(got[0]) > leave_at:
                    return False
                if client == "slow":
                    await asyncio.sleep(0.05)
        return True

    # --- faults

    async def _break(self, fault: str) -> None:
        if fault == "refuse":
            self.tale.faults[fault] += 1
            self._refuse_next = True
            return
        index = self._random.randrange(len(self.processes))
        process = self.processes[index]
        self.tale.faults[f"{fault} {process.room}"] += 1
        if fault == "stop":
            process.signal(signal.SIGSTOP)
            await asyncio.sleep(self._random.choice([0.3, 1.5, 4.0]))
            process.signal(signal.SIGCONT)
        else:
            process.signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            await asyncio.to_thread(process.end)
            self.processes[index] = start(f"services.{process.room}", self._path)
            await asyncio.to_thread(self.processes[index].wait_listening)
            self._fill()
        await self._until_ready()

    def _twist_ledger(self) -> None:
        """A refusal: right after a ticket was given out, take it away at its owner."""
        from router import ledger  # the one way a ticket passes

        ask = ledger.Ledger.ask

        async def asked(self_, replica, name, message):
            reply = await ask(self_, replica, name, message)
            if self._refuse_next and isinstance(reply, CacheTicket):
                self._refuse_next = False
                await replica.cancel(name)
            return reply

        ledger.Ledger.ask = asked

    # --- looking

    def _fill(self) -> None:
        places = [process.place for process in self.processes]
        seats = [Seat(key=p["id"], host=p["host"], port=p["port"]) for p in places]
        self.seats.fill("line", seats)

    async def _until_ready(self) -> None:
        """Every replica answers, and every pair has passed its probe."""
        async with asyncio.timeout(60):
            while True:
                prefills, decodes = self.house.seen("prefill")[0], self.house.seen("decode")[0]
                connected = len(self.house.board.connected())
                usable = self.house.pairs.count_usable(prefills, decodes)
                if connected == len(self.processes) and usable == len(prefills) * len(decodes):
                    return
                await asyncio.sleep(0.05)

    async def _count_leaks(self) -> None:
        until = time.monotonic() + 10.0
        while True:
            replicas = self.house.board.connected()
            asked = await asyncio.gather(*[replica.call(Inventory()) for replica in replicas])
            held = [h for h in asked if isinstance(h, Holdings)]
            self.tale.leaked = sum(
                h.pages + h.slots + h.embeddings + h.tickets + h.quarantine for h in held
            )
            for replica, h in zip(replicas, held, strict=True):
                if replica.room != "encoder":  # what the pools themselves say
                    self.tale.leaked += await lost(replica, h.cached)
            if not self.tale.leaked or time.monotonic() > until:
                return
            await asyncio.sleep(0.1)

    def _note_resident(self, index: int) -> None:
        pids = {f"{p.room} {p.popen.pid}": p.popen.pid for p in self.processes}
        for name, pid in (pids | {"router": os.getpid()}).items():
            with contextlib.suppress(psutil.Error):
                resident = psutil.Process(pid).memory_info().rss / 1e6
                self.tale.resident.setdefault(name, []).append((index, resident))


async def lost(replica, cached: Cached) -> int:
    """Slots and pages that are neither free nor kept by a cache."""
    load = await replica.call(Ping())
    slots = load.total_slots - load.free_slots - cached.slots
    return max(0, slots) + max(0, load.total_pages - load.free_pages - cached.pages)


async def soak(folder: Path, *, number: int, seed: int, prompts: int, faults: int) -> Tale:
    """Run one soak in `folder`."""
    author = Author(NANO, seed)
    questions = [author.question() for _ in range(prompts)]
    tables = {
        "model": {"path": str(NANO)},
        "router": {"heartbeat_s": 0.2, "silent_s": 2.0, "probe_s": 60.0},
        "transfer": {"deadline_s": 2.0},
    }
    async with Soak(write_settings(folder / "soak.toml", tables), seed) as running:
        return await running.run(questions, number, faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tale = asyncio.run(
            soak(
                Path(folder),
                number=given.requests,
                seed=given.seed,
                prompts=min(given.prompts, given.requests),
                faults=max(4, given.requests // 50),
            )
        )
    sys.stdout.write(f"{tale.details()}\n{tale.last_line()}\n")
    return int(bool(tale.wrong or tale.endless or tale.leaked))


if __name__ == "__main__":
    sys.exit(main())
