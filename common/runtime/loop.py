"""EngineLoop: the one thread that runs a room's model, and the way into it.

Everything an engine owns is touched by this thread only; others hand it functions with `post` or
`ask`. Between two functions it calls `step`, which does one step of work and says whether there was
any. An exception that is not ours ends the loop: the room is then unwell and must be replaced.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from common.errors import ServingError

log = logging.getLogger(__name__)
T = TypeVar("T")


def promise() -> Future[Any]:
    """A future that its waiter cannot cancel, so that the engine may always settle it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class EngineLoop:
    """A thread with an inbox."""

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        """`step()` runs in the loop's thread; False lets it sleep until something is posted."""
        self._step = step
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in progress."""
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` in the loop's thread soon."""
        self._inbox.put(function)

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the loop's thread; the future has its result or its exception."""
        future: Future[T] = promise()

        def run() -> None:
            try:
                result = function()
            except ServingError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self.failure is not None:
            future.set_exception(ServingError(f"the engine stopped: {self.failure}"))
        else:
            self._inbox.put(run)
        return future

    def _run(self) -> None:
        busy = True
        try:
            while True:
                while True:
                    try:
                        function = self._inbox.get(block=not busy)
                    except queue.Empty:
                        break
                    if function is None:
                        return
                    function()
                    busy = True
                busy = self._step()
        except Exception as error:  # the room's last handler: log, tell, stop
            log.exception("the engine stopped")
            self.failure = error
            if self.on_failure is not None:
                self.on_failure(error)
