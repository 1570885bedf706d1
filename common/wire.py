"""Messages over one TCP connection: calls with replies, and pushes without.

Frame: length (u32), call number (u32), flag (u8), then one packed message; little-endian. The
dialling side says `Hello` first and gets the callee's `Endpoint`. Many calls share a connection and
are answered in any order. Knows nothing of rooms; never imports torch or Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import struct
import time
from collections.abc import Awaitable, Callable

import msgspec

from common.contract.messages import (
    VERSION,
    AnyMessage,
    Endpoint,
    Hello,
    Message,
    Refused,
    pack,
    unpack,
)
from common.contract.refusals import from_refused, to_refused
from common.errors import ConfigError, RoomLost, ServingError

_log = logging.getLogger("baton.wire")

_HEAD = struct.Struct("<IIB")
_CALL, _REPLY, _PUSH = 0, 1, 2
FRAME_LIMIT = 256 << 20  # bytes of one message; a longer one ends the connection
BACKLOG_LIMIT = 16 << 20  # unsent bytes after which a peer that does not read is dropped
HELLO_S = 5.0

Handler = Callable[["AnyMessage", "Wire"], Awaitable[Message]]
Listener = Callable[["AnyMessage"], None]


class Wire:
    """One connection, either end of it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        handler: Handler | None = None,
        listener: Listener | None = None,
        caller: str = "",
    ) -> None:
        """`handler` answers calls, `listener` takes pushes; `caller` is the name from `Hello`."""
        self._reader, self._writer = reader, writer
        self._handler, self._listener = handler, listener
        self.caller = caller
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AnyMessage]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()
        self.heard_at = time.monotonic()  # when the last message came

    def start(self) -> None:
        """Begin to read."""
        self._pump = asyncio.get_running_loop().create_task(self._read())

    async def call(self, message: Message, *, timeout_s: float) -> AnyMessage:
        """Send a message and wait for its reply.

        Raises:
            RoomLost: the connection broke, or no reply came within `timeout_s`.
            ServingError: the error the peer answered with.
        """
        if self.closed.is_set():
            raise RoomLost("the connection to the replica is closed")
        number = next(self._numbers)
        future: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(number, _CALL, message)
            # Not `wait_for`: before Python 3.12 it takes a cancel that meets the end for no cancel.
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            name = type(message).__name__
            raise RoomLost(f"no reply to {name} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(reply, Refused):
            raise from_refused(reply)
        return reply

    def push(self, message: Message) -> None:
        """Send a message that has no reply. A peer that does not read is dropped."""
        if not self.closed.is_set():
            self._send(0, _PUSH, message)
            if self._writer.transport.get_write_buffer_size() > BACKLOG_LIMIT:
                self.close()

    def close(self) -> None:
        """End the connection; calls in flight raise `RoomLost`."""
        if self.closed.is_set():
            return
        self.closed.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RoomLost("the connection to the replica broke"))
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        if self._pump is not None and self._pump is not asyncio.current_task():
            self._pump.cancel()

    def _send(self, number: int, flag: int, message: Message) -> None:
        body = pack(message)
        self._writer.write(_HEAD.pack(len(body), number, flag) + body)

    async def _read(self) -> None:
        try:
            while True:
                length, number, flag = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                if length > FRAME_LIMIT:
                    break
                self._take(number, flag, unpack(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            pass  # a broken or misspoken connection ends the same way: closed, callers told
        finally:
            self.close()

    def _take(self, number: int, flag: int, message: AnyMessage) -> None:
        self.heard_at = time.monotonic()
        if flag == _REPLY:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(message)
        elif flag == _PUSH:
            if self._listener is not None:
                self._listener(message)
        elif self._handler is not None:
            task = asyncio.get_running_loop().create_task(self._answer(number, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, message: AnyMessage) -> None:
        assert self._handler is not None
        try:
            reply: Message = await self._handler(message, self)
        except ServingError as error:
            reply = to_refused(error)
        except Exception:  # without a reply the caller would wait for its whole timeout
            _log.exception("a handler failed on %s", type(message).__name__)
            reply = to_refused(ServingError("the room met a fault of its own; its log has more"))
        if not self.closed.is_set():
            self._send(number, _REPLY, reply)


async def dial(
    host: str, port: int, *, secret: str, caller: str, listener: Listener | None = None
) -> tuple[Wire, Endpoint]:
    """Connect and introduce ourselves.

    Raises:
        RoomLost: nobody answers there.
        ConfigError: the peer speaks another version or has another secret.
    """
    try:
        async with asyncio.timeout(HELLO_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise RoomLost(f"cannot reach the replica at {host}:{port}: {error}") from error
    wire = Wire(reader, writer, listener=listener)
    wire.start()
    try:
        hello = Hello(version=VERSION, secret=secret, caller=caller)
        endpoint = await wire.call(hello, timeout_s=HELLO_S)
    except BaseException:
        wire.close()
        raise
    if not isinstance(endpoint, Endpoint):
        wire.close()
        raise ConfigError(f"{host}:{port} answered Hello with {type(endpoint).__name__}")
    return wire, endpoint


class Listening:
    """A listening socket; every accepted connection must begin with a valid `Hello`."""

    def __init__(self, *, secret: str, handler: Handler, endpoint: Callable[[], Endpoint]) -> None:
        """`endpoint()` is asked at every `Hello`, so that it may change until the room is ready."""
        self._secret, self._handler, self._endpoint = secret, handler, endpoint
        self._server: asyncio.Server | None = None
        self.wires: set[Wire] = set()
        self.on_lost: Callable[[Wire], None] | None = None

    async def open(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        for wire in list(self.wires):
            wire.close()
        if self._server is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 2)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, handler=self._guard)
        wire.start()
        self.wires.add(wire)
        try:
            await wire.closed.wait()
        finally:
            self.wires.discard(wire)
            if self.on_lost is not None and wire.caller:
                self.on_lost(wire)

    async def _guard(self, message: AnyMessage, wire: Wire) -> Message:
        if isinstance(message, Hello):
            if message.version != VERSION:
                raise ConfigError(
                    f"protocol version {message.version} was offered, this replica speaks "
                    f"{VERSION}; run one release everywhere"
                )
            if not hmac.compare_digest(message.secret, self._secret):
                raise ConfigError("the secret in Hello is not this deployment's")
            wire.caller = message.caller
            return self._endpoint()
        if not wire.caller:
            raise ConfigError("the first message of a connection must be Hello")
        return await self._handler(message, wire)
