"""Fake rooms that speak the contract over real sockets, and remember what they hold.

They compute nothing: token `i` of choice `c` is `answer(prompt, c, i)`. A test can plant a reply
(`plant`), hold a call at the door (`gate`), stop frames after some tokens (`pause_after`) or end
the replica (`die`).

Longer than 300 lines because three fake rooms share one way of remembering.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable

from common.contract import messages as m
from common.contract.messages import VERSION
from common.errors import Cancelled, CapacityError, HandoffRefused
from common.wire import Listening, Wire

SECRET = "test-secret"
_nonces = itertools.count(1)
_epochs = itertools.count(100)


def nonce() -> bytes:
    return next(_nonces).to_bytes(16, "little")


def answer(prompt, choice: int, index: int) -> int:
    """What the fake model says."""
    return (sum(prompt) * 31 + choice * 17 + index * 7) % 190 + 10


class FakeRoom:
    """One replica; `held` maps what a request holds here to the request's name."""

    room = ""

    def __init__(self, name: str, world: World) -> None:
        self.id, self.world, self.epoch = name, world, next(_epochs)
        self.seen: list[m.Message] = []
        self.held: dict[bytes, str] = {}
        self.planted: dict[type, list] = defaultdict(list)
        self.gates: dict[type, asyncio.Event] = {}
        self.cancelled: set[str] = set()
        self.suspended = False
        self.port = 0
        self.listening = Listening(secret=SECRET, handler=self.handle, endpoint=self.endpoint)

    async def open(self) -> None:
        self.port = await self.listening.open("127.0.0.1", self.port)

    async def die(self) -> None:
        """End like a killed process: connections break, memory is gone."""
        self.held.clear()
        await self.listening.close()

    async def rise(self) -> None:
        """Start again on the same port in a new epoch."""
        self.epoch = next(_epochs)
        self.listening = Listening(secret=SECRET, handler=self.handle, endpoint=self.endpoint)
        await self.open()

    def endpoint(self) -> m.Endpoint:
        return m.Endpoint(
            room=self.room,
            id=self.id,
            epoch=self.epoch,
            host="127.0.0.1",
            port=self.port,
            agent=self.id,
            agent_metadata=b"",
            pools=(),
            model_print="m",
            layout_print="l",
        )

    def plant(self, kind: type, *replies) -> None:
        """Answer the next calls of this kind with these: a message, or an error to raise."""
        self.planted[kind].extend(replies)

    def gate(self, kind: type) -> asyncio.Event:
        """Hold calls of this kind until the returned event is set."""
        self.gates[kind] = asyncio.Event()
        return self.gates[kind]

    def names(self) -> list[str]:
        """Kinds of the messages seen, heartbeats left out."""
        return [type(x).__name__ for x in self.seen if not isinstance(x, m.Ping)]

    def last(self, kind: type):
        return [x for x in self.seen if isinstance(x, kind)][-1]

    async def handle(self, message, wire: Wire):
        if not isinstance(message, m.Ping):
            self.seen.append(message)
        if type(message) in self.gates:
            await self.gates[type(message)].wait()
            if getattr(message, "request", None) in self.cancelled:
                raise Cancelled("the request was cancelled while it waited")
        if self.planted[type(message)]:
            reply = self.planted[type(message)].pop(0)
            if isinstance(reply, Exception):
                raise reply
            return reply
        return await self.small(message) or await self.verb(message, wire)

    async def small(self, message):
        match message:
            case m.Ping():
                return self.load()
            case m.Renew() | m.Pace():
                return m.Done()
            case m.Release():
                self.held.pop(message.nonce, None)
                return m.Done()
            case m.Cancel():
                self.forget(message.request)
                return m.Done()
            case m.Inventory():
                return m.Holdings(
                    room=self.room, id=self.id, epoch=self.epoch, tickets=len(self.held)
                )
        return None

    def forget(self, request: str) -> None:
        self.cancelled.add(request)
        self.held = {key: name for key, name in self.held.items() if name != request}

    def load(self) -> m.Load:
        return m.Load(
            epoch=self.epoch,
            free_slots=8,
            free_pages=100,
            total_slots=8,
            total_pages=100,
            suspended=self.suspended,
            counters={"baton_resident_bytes": 1.0},
        )

    async def verb(self, message, wire: Wire):
        raise NotImplementedError


class FakeEncoder(FakeRoom):
    room = "encoder"

    def __init__(self, name, world) -> None:
        super().__init__(name, world)
        self.known: set[bytes] = set()

    async def verb(self, job: m.EncodeJob, wire):
        self.known |= {i.digest for i, data in zip(job.images, job.payloads, strict=True) if data}
        missing = tuple(i for i, x in enumerate(job.images) if x.digest not in self.known)
        if missing:
            return m.ImagesMissing(indices=missing)
        ticket = m.EmbedTicket(
            nonce=nonce(),
            producer=self.id,
            epoch=self.epoch,
            model_print="m",
            layout_print="l",
            parts=(),
            lease_s=30.0,
        )
        self.held[ticket.nonce] = job.request
        return ticket


class FakePrefill(FakeRoom):
    room = "prefill"

    def __init__(self, name, world) -> None:
        super().__init__(name, world)
        self.is_early = False  # whether offers leave before their seals
        self.after_offer: list[Exception] = []  # what the next jobs fail with, once offered

    async def verb(self, job: m.PrefillJob, wire):
        if job.embeds is not None:
            self.world.release(job.embeds.producer, job.embeds.nonce)
        offer = m.Offer(
            nonce=nonce(),
            producer=self.id,
            epoch=self.epoch,
            model_print="m",
            layout_print="l",
            parts=(),
            lease_s=30.0,
        )
        self.held[offer.nonce] = job.request
        if self.is_early:
            wire.push(m.Offered(request=job.request, offer=offer))
            await asyncio.sleep(0.02)
            if self.after_offer:
                del self.held[offer.nonce]
                raise self.after_offer.pop(0)
        script = job.sampling.script
        first = tuple(
            m.TokenOut(id=script[0] if script else self.world.answer(job.token_ids, c, 0))
            for c in range(job.sampling.n)
        )
        seal = m.Seal(
            num_tokens=len(job.token_ids), token_hash=b"", digests={}, first=first, cached_tokens=0
        )
        return m.CacheTicket(offer=offer, seal=seal)


class FakeDecode(FakeRoom):
    room = "decode"

    def __init__(self, name, world) -> None:
        super().__init__(name, world)
        self.slots = 8
        self.pause_after: int | None = None  # tokens of a choice, after which frames stop
        self.tasks: dict[str, asyncio.Task] = {}

    async def die(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await super().die()

    def forget(self, request: str) -> None:
        super().forget(request)
        if request in self.tasks:
            self.tasks.pop(request).cancel()

    async def verb(self, message, wire):
        if isinstance(message, m.Reserve):
            if len(self.held) >= self.slots:
                raise CapacityError("no slot is free")
            key = nonce()
            self.held[key] = message.request
            return m.Reservation(id=key, epoch=self.epoch, lease_s=30.0)
        if isinstance(message, m.PullJob):
            return m.Done()
        if message.reservation not in self.held:
            raise HandoffRefused("reservation", "this reservation is not held")
        self.world.release(message.ticket.offer.producer, message.ticket.offer.nonce)
        task = asyncio.create_task(self.emit(message, wire))
        self.tasks[message.request] = task
        return m.Accepted(wait_s=0.0, pull_s=0.0, verify_s=0.0)

    async def emit(self, job: m.DecodeJob, wire: Wire) -> None:
        s = job.sampling
        forced = job.forced or tuple((t.id,) for t in job.ticket.seal.first)
        lengths = [len(ids) for ids in forced]
        done = [
            n >= s.max_tokens or ids[-1] in s.stop_ids
            for n, ids in zip(lengths, forced, strict=True)
        ]
        step = 0
        while not all(done):
            await asyncio.sleep(self.world.step_s)
            if self.pause_after is not None and min(lengths) >= self.pause_after:
                await asyncio.sleep(3600)
            items = []
            for c in range(s.n):
                if done[c]:
                    continue
                token = self.token(job, c, lengths[c])
                lengths[c] += 1
                stop = token in s.stop_ids
                finish = "stop" if stop else "length" if lengths[c] >= s.max_tokens else ""
                done[c] = bool(finish)
                items.append(
                    m.TokenItem(
                        request=job.request,
                        choice=c,
                        tokens=(m.TokenOut(id=token),),
                        finish=finish,
                    )
                )
            if all(done):
                self.held.pop(job.reservation, None)
                self.tasks.pop(job.request, None)
            step += 1
            wire.push(m.TokenFrame(step=step, items=tuple(items)))

    def token(self, job: m.DecodeJob, choice: int, index: int) -> int:
        script = job.sampling.script
        if script:
            return script[index] if index < len(script) else job.sampling.stop_ids[0]
        return self.world.answer(job.token_ids, choice, index)


_KINDS = {"encoder": FakeEncoder, "prefill": FakePrefill, "decode": FakeDecode}


class World:
    """Some rooms; also the table of seats a router reads."""

    def __init__(self, **counts: int) -> None:
        counts = counts or {"encoder": 1, "prefill": 1, "decode": 1}
        self.answer: Callable = answer
        self.step_s = 0.0  # of a fake decode step
        self.rooms: dict[str, FakeRoom] = {}
        for kind, count in counts.items():
            for i in range(count):
                name = f"{kind[0]}{i + 1}"
                self.rooms[name] = _KINDS[kind](name, self)

    def __getitem__(self, name: str):
        return self.rooms[name]

    async def open(self) -> None:
        for room in self.rooms.values():
            await room.open()

    async def close(self) -> None:
        for room in self.rooms.values():
            await room.die()

    def release(self, producer: str, key: bytes) -> None:
        self.rooms[producer].held.pop(key, None)

    def held(self) -> dict[str, list[str]]:
        """What is held, by replica; empty when nothing is left."""
        return {n: sorted(r.held.values()) for n, r in self.rooms.items() if r.held}

    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{room.port}" for room in self.rooms.values())


async def until(claim: Callable[[], bool], timeout_s: float = 3.0) -> None:
    """Wait until a claim is true, or fail."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not claim():
        assert asyncio.get_running_loop().time() < end, "this did not come true in time"
        await asyncio.sleep(0.005)


__all__ = ["SECRET", "VERSION", "FakeDecode", "FakeEncoder", "FakePrefill", "World", "until"]
