"""One journey beside its reader: set out, give events as they come, end, free.

Every journey ends with a finish reason for each choice or with an error. When the reader leaves, or
the deadline passes, or anything at all goes wrong, what the rooms may hold is given back; that runs
in the background and outlives the reader. The way through the rooms: `router/flow.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from common.contract.messages import TokenItem
from common.errors import Cancelled, DeadlineExceeded, ServingError
from router.account import Account
from router.answer import Answer
from router.flow import Flow
from router.house import House
from router.jobs import Task
from router.ledger import Ledger

_log = logging.getLogger("baton.journey")


class Journey:
    """`async with` it, wait until it is `admitted`, iterate its `events` once."""

    def __init__(self, task: Task, house: House) -> None:
        """Nothing runs yet."""
        self._task, self._house = task, house
        self.account = Account(task, house.tally, house.recent, house.settings.objective)
        self.answer = Answer(task.sampling, self.account, house.tally)
        self._ledger = Ledger(house, task.deadline)
        self._error: ServingError | None = Cancelled("the client left")  # until it arrives
        self._runner: asyncio.Task[None] | None = None

    def set_out(self) -> None:
        """Begin."""
        self._house.running += not self._task.probe
        self._house.cuts.add(self.cut)
        self._runner = self._house.spawn(self._run())
        self._runner.add_done_callback(self._end)  # also when it is cancelled before it began

    def cut(self, error: ServingError) -> None:
        """End it with this error; what was not read yet still can be."""
        self._error = error
        self.turn_back()

    def turn_back(self) -> None:
        """End it if it is still on its way. Once is enough, twice does no harm."""
        if self._runner is not None:
            self._runner.cancel()

    def enough(self) -> None:
        """The reader has all it wants; that the rooms are stopped in their work is no failure."""
        if not self.answer.is_complete:
            self._error = None
            self.turn_back()

    async def __aenter__(self) -> Journey:
        """Set out."""
        self.set_out()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Turn back."""
        self.turn_back()

    async def admitted(self) -> None:
        """Wait until a decode replica has room for it.

        Raises:
            ServingError: it ended before that.
        """
        await self.seated()
        if not self.answer.admitted.is_set():
            await self.answer.outbox.get()  # raises what ended it

    async def seated(self) -> None:
        """Wait until it is admitted, or over."""
        assert self._runner is not None, "it has not set out"
        seated = asyncio.ensure_future(self.answer.admitted.wait())
        try:
            await asyncio.wait({seated, self._runner}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            seated.cancel()

    async def events(self) -> AsyncIterator[TokenItem]:
        """Tokens and finish reasons of all choices, as they come.

        Raises:
            ServingError: the request could not be finished; what came before still counts.
        """
        while (item := await self.answer.outbox.get()) is not None:
            yield item

    async def _run(self) -> None:
        flow = Flow(self._task, self._house, self.answer, self._ledger, self.account)
        try:
            async with asyncio.timeout_at(self._task.deadline):
                await flow.travel()
            self._error = None
        except TimeoutError:
            self._error = DeadlineExceeded("the request's time ran out")
        except ServingError as error:
            self._error = error
        except Exception:
            _log.exception("a fault in the router")
            self._error = ServingError("the router met a fault of its own")

    def _end(self, _: asyncio.Task[None]) -> None:
        self._house.running -= not self._task.probe
        self._house.cuts.discard(self.cut)
        self.answer.close(self._error)
        self._ledger.free()
        outcome = self._error.code if self._error else self.answer.finish[0] or "stop"
        self.account.close(outcome)
