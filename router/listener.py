"""An HTTP server of this process's own: uvicorn on a socket that several replicas may share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from typing import Any, cast

import uvicorn

from common.config.settings import ServerSettings
from common.errors import ConfigError
from router.http_bounds import BoundedHttp

BACKLOG = 2048
LATE_S, LATE_LOOKS = 0.5, 25  # for the request of a client that has connected just before the end
IDLE_S = 75  # a connection between two requests; clients' pools keep theirs for less


class HttpListener:
    """One app on one address."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        drain_s: float,
        bounds: ServerSettings,
    ) -> None:
        """`port` 0 takes any; on stopping, running requests have `drain_s` to end.

        Of `bounds`, those of a request's head count here.
        """
        self.host, self.port = host, port
        protocol = partial(
            BoundedHttp, header_bytes=bounds.header_limit_bytes, read_s=bounds.read_s
        )
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",  # an upgrade is ignored, the request answered
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
        self._server = uvicorn.Server(config)
        # Signals belong to whoever runs the process: Ray, or `python -m router.app`.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # Without the protocol's number asyncio leaves TCP_NODELAY off, and every reply waits 40 ms
        # for an acknowledgement.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.port:  # router replicas of one host share the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((self.host, self.port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror}; choose another port"
            ) from error
        self.port = int(sock.getsockname()[1])
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError(f"the listener on {self.host}:{self.port} ended at once")
            await asyncio.sleep(0.005)
        return self.port

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._task is not None and not self._task.done()

    async def stop(self) -> None:
        """Take no more connections, let requests end for a while, then cut them."""
        if self._task is None:
            return
        for server in self._server.servers:
            server.close()  # from now on others that share the port get the connections
        for _ in range(LATE_LOOKS):
            if not any(map(_has_not_asked, self._server.server_state.connections)):
                break
            await asyncio.sleep(LATE_S / LATE_LOOKS)
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def _has_not_asked(connection: Any) -> bool:
    return getattr(connection, "cycle", None) is None
