"""What waits between a decode replica's frames and a client that reads at its own pace.

A client that leaves more than `LIMIT` items unread for `PATIENCE_S` is given up. What piles up
until then is bounded by the request's own `max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from common.contract.messages import TokenItem

LIMIT = 256
PATIENCE_S = 10.0


class Outbox:
    """A queue of one writer and one reader that can end, or fail after what it holds."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        """Start empty."""
        self._items: deque[TokenItem] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._full_since: float | None = None
        self._clock = clock

    def put(self, item: TokenItem) -> bool:
        """Append; false when the reader has been too slow for too long."""
        self._items.append(item)
        self._wake.set()
        if len(self._items) <= LIMIT:
            self._full_since = None
            return True
        if self._full_since is None:
            self._full_since = self._clock()
        return self._clock() - self._full_since < PATIENCE_S

    def close(self, error: Exception | None = None) -> None:
        """No more items; the reader sees the end, or `error`, after those it has not read."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def get(self) -> TokenItem | None:
        """The next item; None at the end.

        Raises:
            Exception: what `close` was given.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()
