"""Group: a leader and its ranks as one failure domain, over plain sockets.

Ranks join with a secret and their prints; when all are there they are told where their collectives
meet. From then on the leader orders and the ranks obey in order. Whoever is lost takes all others
along within seconds: a closed socket is noticed at once, a stopped rank by its silence. What an
order means is not known here.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from common.errors import ConfigError, RoomLost
from common.runtime.orders import (
    VERSION,
    Failed,
    Join,
    Order,
    Ping,
    Turned,
    Welcome,
    decode,
    encode,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("baton.group")
PING_S = 1.0
SILENT_S = 5.0  # a rank that has not answered for so long is lost
JOIN_S = 1800.0  # loading a rank's weights takes long
_LENGTH = struct.Struct("<I")


class Channel:
    """One socket between a leader and a rank; sending is safe from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        """Take a connected socket."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._lock = sock, threading.Lock()

    def send(self, order: Order) -> None:
        """Send one order.

        Raises:
            RoomLost: the other side is gone.
        """
        raw = encode(order)
        try:
            with self._lock:
                self._sock.sendall(_LENGTH.pack(len(raw)) + raw)
        except OSError as error:
            raise RoomLost(f"the other side of the group is gone: {error}") from error

    def receive(self) -> Order | None:
        """The next order; None when the other side is gone or speaks otherwise."""
        try:
            head = self._exactly(_LENGTH.size)
            return decode(self._exactly(*_LENGTH.unpack(head)))
        except (OSError, EOFError, msgspec.MsgspecError):
            return None

    def patience(self, seconds: float | None) -> None:
        """How long `receive` waits."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Hang up; a waiting `receive` ends on both sides."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


class Leader:
    """The leader's side: all ranks but its own, which is 0."""

    def __init__(self, world: int, join: Join, host: str = "127.0.0.1") -> None:
        """Listen for `world - 1` ranks whose prints are those of `join`."""
        self._world, self._own, self._host = world, join, host
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._channels: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._closing, self._lock = False, threading.Lock()
        self.failure = ""
        self.on_lost: Callable[[str], None] | None = None
        self.on_order: Callable[[int, Order], None] | None = None

    def gather(self, within_s: float = JOIN_S, ended: Callable[[], Sequence[int]] = tuple) -> Store:
        """Wait for all ranks and let them in; returns the store for their collectives.

        Args:
            within_s: how long.
            ended: ranks whose processes are known to have ended, asked every second.

        Raises:
            ConfigError: a rank is of another version, model or layout.
            RoomLost: a rank ended, or did not come in time.
        """
        until = time.monotonic() + within_s
        while len(self._channels) < self._world - 1:
            missing = [rank for rank in range(1, self._world) if rank not in self._channels]
            self._listener.settimeout(PING_S)
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                if lost := [rank for rank in missing if rank in ended()]:
                    raise RoomLost(
                        f"ranks {lost} ended before they joined; see their logs"
                    ) from None
                if time.monotonic() > until:
                    raise RoomLost(
                        f"ranks {missing} did not join within {within_s:g} s; see their logs"
                    ) from None
                continue
            self._let_in(Channel(sock))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, 0, None, True, timedelta(seconds=within_s), wait_for_workers=False
        )
        lineage = secrets.token_hex(8)
        welcome = Welcome(store_host=self._host, store_port=store.port, lineage=lineage)
        for rank, channel in self._channels.items():
            channel.patience(None)
            channel.send(welcome)
            self._heard[rank] = time.monotonic()
            listening = threading.Thread(target=self._listen, args=(rank, channel), daemon=True)
            listening.start()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        return dist.PrefixStore(lineage, store)  # type: ignore[attr-defined]

    def send(self, order: Order) -> None:
        """Order all ranks.

        Raises:
            RoomLost: the group has failed.
        """
        for rank in self._channels:
            self.tell(rank, order)

    def tell(self, rank: int, order: Order) -> None:
        """Order one rank; errors as of `send`."""
        if self.failure:
            raise RoomLost(self.failure)
        try:
            self._channels[rank].send(order)
        except RoomLost:
            self.fail(f"rank {rank} is gone")
            raise

    def fail(self, reason: str) -> None:
        """End the group: every rank loses its leader and ends itself."""
        with self._lock:
            if self._closing:
                return
            self._closing, self.failure = True, reason
        log.error("the group ends: %s", reason)
        self._hang_up()
        if self.on_lost is not None:
            self.on_lost(reason)

    def close(self) -> None:
        """End the group on purpose; `on_lost` is not called."""
        with self._lock:
            self._closing = True
            self.failure = self.failure or "the group was closed"
        self._hang_up()

    def _hang_up(self) -> None:
        self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def _let_in(self, channel: Channel) -> None:
        channel.patience(SILENT_S)
        join = channel.receive()
        if not isinstance(join, Join) or not hmac.compare_digest(join.secret, self._own.secret):
            channel.close()  # a stranger
            return
        reason = _objection(self._own, join, set(self._channels))
        if reason:
            with contextlib.suppress(RoomLost):
                channel.send(Turned(reason=reason))
            channel.close()
            self._hang_up()
            raise ConfigError(reason)
        self._channels[join.rank] = channel

    def _listen(self, rank: int, channel: Channel) -> None:
        while (order := channel.receive()) is not None:
            self._heard[rank] = time.monotonic()
            if isinstance(order, Failed):
                self.fail(f"rank {rank}: {order.reason}")
            elif self.on_order is not None:
                self.on_order(rank, order)
        self.fail(f"rank {rank} ended")

    def _watch(self) -> None:
        while not self._closing:
            time.sleep(PING_S)
            for rank, heard in list(self._heard.items()):
                silent = time.monotonic() - heard
                if silent > SILENT_S:
                    self.fail(f"rank {rank} has been silent for {silent:.1f} s")
                with contextlib.suppress(RoomLost):
                    self.tell(rank, Ping())


def _objection(own: Join, join: Join, taken: set[int]) -> str:
    """Why a rank cannot join; empty when it can."""
    if not 0 < join.rank < own.world or join.rank in taken:
        return f"rank {join.rank} joined a group of {own.world} twice or has no place there"
    for what, mine, theirs in (
        ("protocol version", own.version, join.version),
        ("number of ranks", own.world, join.world),
        ("model print", own.model_print, join.model_print),
        ("layout print", own.layout_print, join.layout_print),
    ):
        if mine != theirs:
            return (
                f"rank {join.rank} has {what} {theirs} and the leader {mine}; start all ranks "
                "from the same version, settings and checkpoint"
            )
    return ""


def enter(host: str, port: int, join: Join, within_s: float = JOIN_S) -> tuple[Channel, Store]:
    """Join a group as a rank; returns its channel and the store for its collectives.

    Raises:
        ConfigError: the leader turned this rank away.
        RoomLost: there is no leader, or it ended.
    """
    try:
        channel = Channel(socket.create_connection((host, port), timeout=within_s))
    except OSError as error:
        raise RoomLost(f"no leader listens at {host}:{port}: {error}") from error
    channel.send(join)
    channel.patience(within_s)
    answer = channel.receive()
    channel.patience(None)
    if not isinstance(answer, Welcome):
        channel.close()
    if isinstance(answer, Turned):
        raise ConfigError(answer.reason)
    if not isinstance(answer, Welcome):
        raise RoomLost("the leader ended before all ranks had joined")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        answer.store_host, answer.store_port, None, False, timedelta(seconds=within_s)
    )
    return channel, dist.PrefixStore(answer.lineage, store)  # type: ignore[attr-defined]


def joining(*, secret: str, rank: int, world: int, model_print: str, layout_print: str) -> Join:
    """A rank's first word, in this version."""
    return Join(
        version=VERSION,
        secret=secret,
        rank=rank,
        world=world,
        model_print=model_print,
        layout_print=layout_print,
    )
