"""The answer as far as it has come: ids by choice, finish reasons, and the way to the client.

Takes a decode replica's frames. Every token is logged before it goes out, so that a request can be
continued elsewhere with exactly what its client has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.contract.finish import finish_of
from common.contract.messages import Refused, Sampling, TokenItem, TokenOut
from common.contract.refusals import from_refused
from common.errors import Cancelled, HandoffRefused, RoomLost, ServingError
from common.observe.metrics import Tally
from router.account import Account
from router.outbox import Outbox

PATIENCE_S = 10.0  # how long a client may leave its full outbox unread


class Answer:
    """All choices of one request."""

    def __init__(self, sampling: Sampling, account: Account, tally: Tally) -> None:
        """Nothing has been said."""
        self.log: list[list[int]] = [[] for _ in range(sampling.n)]
        self.finish = [""] * sampling.n
        self.outbox = Outbox(self._pace)
        self.pace: Callable[[bool], None] | None = None  # makes decode pause, or go on
        self.admitted = asyncio.Event()  # a decode replica has room for it
        self._sampling, self._account, self._tally = sampling, account, tally
        self._over = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None  # runs while paused
        self._verdict: ServingError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every choice has a finish reason."""
        return all(self.finish)

    def greet(self, first: tuple[TokenOut, ...]) -> list[list[int]]:
        """Send the first tokens out, once; after a stumble, return what was sent instead.

        Raises:
            HandoffRefused: not one token for each choice.
        """
        if any(self.log):
            return [list(ids) for ids in self.log]
        if len(first) != self._sampling.n:
            raise HandoffRefused("first", f"{len(first)} tokens for {self._sampling.n} choices")
        for choice, token in enumerate(first):
            finish = finish_of(self._sampling, token.id, 1)
            self.take(TokenItem(request="", choice=choice, tokens=(token,), finish=finish))
        return []

    def take(self, item: TokenItem) -> None:
        """One choice's share of a frame."""
        if self._over.is_set() or self.finish[item.choice]:
            return
        if item.finish == "error":
            return self._end(from_refused(Refused(code=item.code, message=item.error)))
        if item.finish == "cancelled":
            return self._end(RoomLost("the decode replica gave the request up"))
        self.log[item.choice].extend(token.id for token in item.tokens)
        self.finish[item.choice] = item.finish
        self._account.emitted(len(item.tokens))
        if not self.outbox.put(item):
            return self._give_up()
        if self.is_complete:
            self._end(None)

    def lost(self, error: RoomLost) -> None:
        """The replica that sends the frames died or stopped answering."""
        self._end(error)

    def begin(self) -> None:
        """A pass begins: what ended the one before does not end this one."""
        self._verdict = None
        self._over.clear()

    async def until_over(self) -> None:
        """Wait for the last finish reason.

        Raises:
            RoomLost: no more frames come from where they came.
            ServingError: the answer cannot be finished.
        """
        await self._over.wait()
        if self._verdict is not None:
            raise self._verdict

    def close(self, error: ServingError | None) -> None:
        """The journey is over; what was not read yet still can be."""
        self._forget_patience()
        self.outbox.close(error)

    def _pace(self, paused: bool) -> None:
        self._forget_patience()
        if paused and not self._over.is_set():
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up)
        if self.pace is not None:
            self.pace(paused)

    def _give_up(self) -> None:
        if not self._over.is_set():
            self._tally.add("baton_slow_readers_total")
            self._end(Cancelled("the client does not read its stream"))

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _end(self, verdict: ServingError | None) -> None:
        if not self._over.is_set():
            self._verdict = verdict
            self._over.set()
