"""Room: what every room's process has around its engine.

An identity (id and epoch), a listening socket, wires to other rooms for the small messages, and a
clock for leases. It dispatches messages by type, writes a line about every job, and knows nothing
else of them; no Ray here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.contract.messages import (
    AnyMessage,
    Await,
    DecodeJob,
    Done,
    EncodeJob,
    Endpoint,
    Final,
    Message,
    PrefillJob,
    PullJob,
    Release,
    Renew,
    Reserve,
)
from common.contract.regions import Agent, PoolInfo
from common.errors import InvalidRequest, RoomLost, ServingError
from common.observe.logs import note, request_id, trace_id
from common.runtime.identity import Identity
from common.transfer.link import Link
from common.wire import Listening, Wire, dial

log = logging.getLogger("baton.room")
M = TypeVar("M", bound=Message)
_Job = EncodeJob | PrefillJob | Reserve | PullJob | DecodeJob
SWEEP_S = 0.5  # how often leases and quarantine are looked at
SILENT_S = 30.0  # a router that said nothing for as long as a lease lasts is gone
ROUTERS = "router:"  # how a router's name in `Hello` begins
SMALL_S = 5.0  # patience for the reply to a small message
AWAIT_S = 2.0  # after which an owner answers though no more is final


class Room:
    """A replica's socket side; the engine behind it is the caller's."""

    def __init__(self, name: str, *, secret: str, replica: str = "") -> None:
        """`name` is encoder, prefill or decode; `replica` an id from outside, else a new one."""
        self.name = name
        self.id = replica or f"{name}-{secrets.token_hex(4)}"
        self.epoch = time.time_ns()
        self.wires: dict[str, Wire] = {}  # by caller
        self.on_lost: Callable[[str], None] | None = None
        self.peers = Peers(secret=secret, caller=f"{name}:{self.id}")
        self._endpoint: Endpoint | None = None
        self._handlers: dict[type, Callable[..., Awaitable[Message]]] = {}
        self._sweeps: list[Callable[[], None]] = []
        self._listening = Listening(secret=secret, handler=self._handle, endpoint=self._whoami)
        self._listening.on_lost = self._lost
        self._sweeper: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hanging_up: asyncio.Task[None] | None = None
        self.is_leaving = False
        self.ended = asyncio.Event()  # its engine failed, so that it can do nothing more
        self.spent = asyncio.Event()  # it can take nothing new; what runs may still end

    @property
    def endpoint(self) -> Endpoint:
        """Who and where this replica is; known once it listens."""
        assert self._endpoint is not None, "the room does not listen yet"
        return self._endpoint

    def on(self, kind: type[M], handler: Callable[[M, str], Awaitable[Message]]) -> None:
        """Answer messages of `kind` with `handler(message, caller)`."""
        self._handlers[kind] = handler

    def every_sweep(self, sweep: Callable[[], None]) -> None:
        """Run `sweep` on the event loop every `SWEEP_S`; it must not block."""
        self._sweeps.append(sweep)

    async def open(self, host: str, describe: Callable[[str, int], Endpoint]) -> Endpoint:
        """Listen on a free port of `host`; `describe(host, port)` makes the endpoint."""
        self._loop = asyncio.get_running_loop()
        port = await self._listening.open(host)
        self._endpoint = describe(host, port)
        self._sweeper = self._loop.create_task(self._sweep())
        return self._endpoint

    async def close(self) -> None:
        """Stop listening; callers see a broken connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        self.peers.close()
        await self._listening.close()

    def hang_up(self, _: BaseException) -> None:
        """The engine failed: break every connection, which is what a death looks like from outside.

        From any thread. What ran here is continued elsewhere, as after a crash.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hang_up)

    def _hang_up(self) -> None:
        self.ended.set()
        for wire in list(self._listening.wires):  # before any handler could answer with an error:
            wire.close()  # from an error a router could not tell which of two rooms failed
        self._hanging_up = asyncio.get_running_loop().create_task(self._listening.close())

    def tell_all(self, message: Message) -> None:
        """Push a message to every connected caller."""
        for wire in self.wires.values():
            wire.push(message)

    def push(self, caller: str, message: Message) -> None:
        """Send a message without a reply to a connected caller; gone callers are skipped."""
        if (wire := self.wires.get(caller)) is not None:
            wire.push(message)

    def _whoami(self) -> Endpoint:
        return self.endpoint

    async def _handle(self, message: AnyMessage, wire: Wire) -> Message:
        self._welcome(wire)
        handler = self._handlers.get(type(message))
        if handler is None:
            raise InvalidRequest(f"the {self.name} room does not take {type(message).__name__}")
        if isinstance(message, _Job) and not message.probe:
            return await self._told(message, handler(message, wire.caller))
        return await handler(message, wire.caller)

    async def _told(self, job: _Job, work: Awaitable[Message]) -> Message:
        """Do a job, and write a line about how it ended; all lines on the way name its request."""
        name, _, again = job.request.partition("~")
        request_id.set(name)  # each message is handled in a context of its own
        trace_id.set("" if isinstance(job, Reserve) else job.trace[3:35])
        began, outcome = time.monotonic(), "cancelled"
        try:
            reply = await work
            outcome = type(reply).__name__
            return reply
        except ServingError as error:
            outcome = error.code
            raise
        finally:
            note(
                log,
                logging.INFO,
                "job ended",
                job=type(job).__name__,
                outcome=outcome,
                seconds=round(time.monotonic() - began, 5),
                stumbles=int(again or 0),
            )

    def _welcome(self, wire: Wire) -> None:
        """Note who calls. One that dials anew has given up what ran over its old connection."""
        old = self.wires.get(wire.caller)
        if old is not None and old is not wire:
            self._lost(old)
            old.close()
        self.wires[wire.caller] = wire

    def _lost(self, wire: Wire) -> None:
        if self.wires.get(wire.caller) is wire:
            del self.wires[wire.caller]
            if self.on_lost is not None:
                self.on_lost(wire.caller)

    def _drop_silent(self) -> None:
        """A router pings all the time; one whose host vanished leaves a connection that is open."""
        now = time.monotonic()
        for caller, wire in list(self.wires.items()):
            if caller.startswith(ROUTERS) and now - wire.heard_at > SILENT_S:
                note(log, logging.WARNING, "a silent router's requests are dropped", caller=caller)
                wire.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._drop_silent()
            for sweep in self._sweeps:
                sweep()


def describe(
    room: Room,
    identity: Identity,
    host: str,
    port: int,
    link: Link,
    pools: tuple[PoolInfo, ...],
    ranks: tuple[Agent, ...] = (),
) -> Endpoint:
    """The endpoint of a replica whose pools are registered; `ranks` are those beside a leader."""
    return Endpoint(
        room=room.name,
        id=room.id,
        epoch=room.epoch,
        host=host,
        port=port,
        agent=link.agent,
        agent_metadata=link.metadata(),
        pools=pools,
        model_print=identity.model_print,
        layout_print=identity.layout_print,
        ranks=ranks,
    )


class Peers:
    """Wires to other rooms, dialled when first needed, for renew, await and release."""

    def __init__(self, *, secret: str, caller: str) -> None:
        """`caller` is this room's name in `Hello`."""
        self._secret, self._caller = secret, caller
        self._wires: dict[tuple[str, int], Wire] = {}
        self._dialling: dict[tuple[str, int], asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def claim(self, owner: Endpoint, nonce: bytes, timeout_s: float) -> None:
        """Renew a ticket and wait for the answer.

        Raises:
            HandoffRefused: part "lease": the owner holds it no more.
            RoomLost: the owner does not answer.
        """
        reply = await self._call(owner, Renew(nonces=(nonce,)), min(timeout_s, SMALL_S))
        assert isinstance(reply, Done)

    async def final(self, owner: Endpoint, nonce: bytes, known: int) -> int:
        """Wait until more than `known` portions of an offer are final, or for `AWAIT_S`; how many.

        Raises:
            HandoffRefused: part "lease": the owner holds it no more.
            RoomLost: the owner does not answer.
        """
        reply = await self._call(owner, Await(nonce=nonce, known=known), AWAIT_S + SMALL_S)
        assert isinstance(reply, Final)
        return reply.portions

    def release(self, owner: Endpoint, nonce: bytes, outcome: str) -> None:
        """Tell the owner that a ticket is done with; if this is lost, its lease runs out."""
        self._send(owner, Release(nonce=nonce, outcome=outcome))

    def close(self) -> None:
        """Drop every wire."""
        for task in self._tasks:
            task.cancel()
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()

    def _send(self, owner: Endpoint, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver(owner, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, owner: Endpoint, message: Message) -> None:
        try:
            await self._call(owner, message, SMALL_S)
        except ServingError as error:
            what = type(message).__name__
            note(log, logging.WARNING, "told in vain", what=what, to=owner.id, reason=str(error))

    async def _call(self, owner: Endpoint, message: Message, timeout_s: float) -> AnyMessage:
        key = (owner.id, owner.epoch)
        async with self._dialling.setdefault(key, asyncio.Lock()):
            wire = self._wires.get(key)
            if wire is None or wire.closed.is_set():
                wire, found = await dial(
                    owner.host, owner.port, secret=self._secret, caller=self._caller
                )
                if (found.id, found.epoch) != key:
                    wire.close()
                    raise RoomLost(f"another replica listens where {owner.id} did")
                self._wires[key] = wire
        return await wire.call(message, timeout_s=timeout_s)
