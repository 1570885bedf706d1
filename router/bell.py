"""Wake whoever waits for the state of the rooms to change. Knows nothing of what changed."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    """`ring` wakes every waiter of this moment; a ring nobody waits for is not kept."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake all."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next ring, or after `timeout_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await future
        finally:
            self._waiting.discard(future)
