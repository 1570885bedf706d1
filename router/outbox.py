"""What waits between a decode replica's frames and a client that reads at its own pace.

Holds `LIMIT` items. Somewhat before that it asks for a pause, so that frames on their way still
fit, and when the reader has caught up it asks to go on. How long a pause may last is decided in
`router/answer.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from common.contract.messages import TokenItem

LIMIT = 256
STOP_AT, GO_AT = 192, 64  # unread items at which to ask for a pause, and for its end


class Outbox:
    """A queue of one writer and one reader that can end, or fail after what it holds."""

    def __init__(self, pace: Callable[[bool], None]) -> None:
        """Start empty; `pace(True)` asks the writer to pause, `pace(False)` to go on."""
        self._items: deque[TokenItem] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._pace = pace
        self.is_paused = False

    def put(self, item: TokenItem) -> bool:
        """Append; false when the limit is passed, since the writer did not pause."""
        self._items.append(item)
        self._wake.set()
        if len(self._items) >= STOP_AT and not self.is_paused:
            self.is_paused = True
            self._pace(True)
        return len(self._items) <= LIMIT

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
        item = self._items.popleft()
        if self.is_paused and len(self._items) <= GO_AT:
            self.is_paused = False
            self._pace(False)
        return item
