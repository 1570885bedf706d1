"""Real rooms over real NIXL, driven by the router's own journey, without HTTP and without Ray.

Either in this process (`in_process`: tests may reach into the rooms) or as processes of their own
(`with_processes`). `Relay.run` takes token ids and gives back what every choice emitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config.loading import load_settings
from common.config.settings import Settings
from common.contract.messages import Holdings, ImageRef, Inventory, Sampling, TokenOut
from router.app import Router
from router.house import House
from router.jobs import Task
from router.journey import Journey
from router.seats import Seat, Seats
from services.decode.room import DecodeRoom
from services.encoder.room import EncoderRoom
from services.prefill.room import PrefillRoom
from tests.support.processes import SECRET, Process, rooms

PRESENT_S = 30.0


@dataclass
class Reply:
    """What one request came to."""

    tokens: list[list[TokenOut]]
    finish: list[str]

    def ids(self, choice: int = 0) -> list[int]:
        return [token.id for token in self.tokens[choice]]

    def logprobs(self, choice: int = 0) -> list[float]:
        return [token.logprob for token in self.tokens[choice]]


@dataclass
class Relay:
    """A router's insides and the rooms it speaks to."""

    house: House
    encoders: list[EncoderRoom] = field(default_factory=list)
    prefills: list[PrefillRoom] = field(default_factory=list)
    decodes: list[DecodeRoom] = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)

    def task(
        self,
        token_ids: Sequence[int],
        *,
        images: Sequence[tuple[ImageRef, bytes]] = (),
        offsets: Sequence[int] = (),
        deadline_s: float = 60.0,
        canary: bool = False,
        **sampling,
    ) -> Task:
        sampling = {"temperature": 0.0, "max_tokens": 6, "logprobs": 0} | sampling
        return Task(
            request=f"q{next(self.numbers)}",
            token_ids=tuple(token_ids),
            sampling=Sampling(**sampling),
            deadline=asyncio.get_running_loop().time() + deadline_s,
            images=tuple(images),
            image_offsets=tuple(offsets),
            canary=canary,
        )

    async def run(self, task: Task) -> Reply:
        n = task.sampling.n
        reply = Reply(tokens=[[] for _ in range(n)], finish=[""] * n)
        async with Journey(task, self.house) as journey:
            async for item in journey.events():
                reply.tokens[item.choice].extend(item.tokens)
                reply.finish[item.choice] = item.finish or reply.finish[item.choice]
        return reply

    async def holdings(self) -> list[Holdings]:
        asked = [replica.call(Inventory()) for replica in self.house.board.connected()]
        return list(await asyncio.gather(*asked))

    async def nothing_left(self, within_s: float = 10.0) -> None:
        """Until no room holds anything for a request."""
        until = asyncio.get_running_loop().time() + within_s
        while True:
            held = await self.holdings()
            if not any(
                h.pages or h.slots or h.embeddings or h.tickets or h.quarantine for h in held
            ):
                return
            assert asyncio.get_running_loop().time() < until, f"still held: {held}"
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def in_process(
    settings: Settings,
    *,
    encoder: int = 0,
    prefill: int = 1,
    decode: int = 1,
    decode_ops: str | None = None,
) -> AsyncIterator[Relay]:
    """So many rooms of each kind in this process, each with its own NIXL agent.

    `decode_ops` are decode's bodies of ops, where they are not all rooms'.
    """
    encoders = [EncoderRoom(settings, secret=SECRET) for _ in range(encoder)]
    prefills = [PrefillRoom(settings, secret=SECRET) for _ in range(prefill)]
    stepping = changed(settings, model={"ops": decode_ops}) if decode_ops else settings
    decodes = [DecodeRoom(stepping, secret=SECRET) for _ in range(decode)]
    everyone = [*encoders, *prefills, *decodes]
    endpoints = [await room.open("127.0.0.1") for room in everyone]
    seats = [Seat(key=e.id, host=e.host, port=e.port) for e in endpoints]
    try:
        async with house_of(settings, seats) as house:
            yield Relay(house, encoders, prefills, decodes)
    finally:
        for room in everyone:
            await room.close()


@contextlib.asynccontextmanager
async def with_producers(path: Path) -> AsyncIterator[tuple[Relay, DecodeRoom, list[Process]]]:
    """A decode room in this process before two prefill rooms in processes of their own."""
    settings = load_settings(path, {})
    with rooms(path, prefill=2, decode=0) as producers:
        decode = DecodeRoom(settings, secret=SECRET)
        there = await decode.open("127.0.0.1")
        places = [process.place for process in producers]
        seats = [Seat(key=p["id"], host=p["host"], port=p["port"]) for p in places]
        seats.append(Seat(key=there.id, host=there.host, port=there.port))
        try:
            async with house_of(settings, seats) as house:
                yield Relay(house, decodes=[decode]), decode, producers
        finally:
            await decode.close()


@contextlib.asynccontextmanager
async def with_processes(
    path: Path,
    *,
    encoder: int = 0,
    prefill: int = 1,
    decode: int = 1,
    decode_path: Path | None = None,
    harm: Path | None = None,
) -> AsyncIterator[Relay]:
    """The same with a process for every room; `path` is a deployment file, `decode_path` decode's
    own where it differs, `harm` the file of `tests.support.harm`.
    """
    with rooms(
        path,
        encoder=encoder,
        prefill=prefill,
        decode=decode,
        decode_settings=decode_path,
        harm=harm,
    ) as running:
        places = [process.place for process in running]
        seats = [Seat(key=p["id"], host=p["host"], port=p["port"]) for p in places]
        async with house_of(load_settings(path, {}), seats) as house:
            yield Relay(house)


@contextlib.asynccontextmanager
async def house_of(settings: Settings, places: list[Seat]) -> AsyncIterator[House]:
    seats = Seats()
    seats.fill("line", places)
    house = House(settings, seats, secret=SECRET, name="test")
    house.start()
    try:
        async with asyncio.timeout(PRESENT_S):
            while len(house.board.connected()) < len(places):
                await asyncio.sleep(0.02)
        for prefill in house.seen("prefill")[0]:
            for decode in house.seen("decode")[0]:
                house.pairs.passed(prefill, decode)
        yield house
    finally:
        await house.stop()


def changed(settings: Settings, **tables: dict[str, object]) -> Settings:
    """A copy of the settings with some keys of some tables replaced."""
    return dataclasses.replace(
        settings,
        **{
            name: dataclasses.replace(getattr(settings, name), **values)
            for name, values in tables.items()
        },
    )


@contextlib.asynccontextmanager
async def with_front(settings: Settings, **counts: int) -> AsyncIterator[tuple[Relay, Router]]:
    """Rooms in this process behind a whole router, whose ports are 0; ready when it begins."""
    kinds = {"encoder": EncoderRoom, "prefill": PrefillRoom, "decode": DecodeRoom}
    rooms = {
        name: [kinds[name](settings, secret=SECRET) for _ in range(n)] for name, n in counts.items()
    }
    everyone = [room for some in rooms.values() for room in some]
    endpoints = [await room.open("127.0.0.1") for room in everyone]
    seats = Seats()
    seats.fill("line", [Seat(key=e.id, host=e.host, port=e.port) for e in endpoints])
    router = Router(settings, seats, secret=SECRET, name="front")
    try:
        await router.start()
        house, pairs = router.house, counts["prefill"] * counts["decode"]
        async with asyncio.timeout(PRESENT_S):
            while (
                len(house.board.connected()) < len(everyone)
                or house.pairs.count_usable(house.seen("prefill")[0], house.seen("decode")[0])
                < pairs
            ):
                await asyncio.sleep(0.02)
        yield (
            Relay(house, rooms.get("encoder", []), rooms["prefill"], rooms["decode"]),
            router,
        )
    finally:
        await router.stop()
        for room in everyone:
            await room.close()
