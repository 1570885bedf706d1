"""EngineLoop: the one thread that runs a room's model, and the way into it.

Everything an engine owns is touched by this thread only; others hand it functions with `post` or
`ask`. Between two functions it calls `step`, which does one step of work and says whether there was
any. An exception that is not ours ends the loop: the room is then unwell and must be replaced.
Nothing posted is lost in silence: what the loop can no longer run is told so.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from common.errors import RoomLost, ServingError

log = logging.getLogger("baton.engine")
T = TypeVar("T")
Lost = Callable[[ServingError], None]


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
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Lost | None] | None] = (
            queue.SimpleQueue()
        )
        self._gate = threading.Lock()  # nothing is put into the inbox of a loop that is over
        self._over: ServingError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._on_failure: list[Callable[[BaseException], None]] = []
        self._first: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None

    def start(self, first: Callable[[], None] | None = None) -> None:
        """Begin, with `first` in the loop's thread."""
        if first is not None:
            self._first = first
        self._thread.start()

    def stop(self) -> None:
        """End after the step in progress."""
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def on_failure(self, tell: Callable[[BaseException], None]) -> None:
        """Call `tell` in the loop's thread when an exception ended it; the latest given first."""
        self._on_failure.append(tell)

    def post(self, function: Callable[[], None], lost: Lost | None = None) -> None:
        """Run `function` in the loop's thread soon; if the loop ends before that, call `lost`."""
        with self._gate:
            if self._over is None:
                self._inbox.put((function, lost))
                return
        if lost is not None:
            lost(self._over)

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

        self.post(run, future.set_exception)
        return future

    def _run(self) -> None:
        busy = True
        try:
            self._first()
            while True:
                while True:
                    try:
                        posted = self._inbox.get(block=not busy)
                    except queue.Empty:
                        break
                    if posted is None:
                        return
                    posted[0]()
                    busy = True
                busy = self._step()
        except Exception as error:  # the room's last handler: log, tell, stop
            log.exception("the engine stopped")
            self.failure = error
        finally:
            self._bury()

    def _bury(self) -> None:
        """Nothing runs any more: tell the room, then whoever waits for something posted."""
        with self._gate:
            self._over = RoomLost(f"the engine stopped: {self.failure or 'it was told to'}")
        if self.failure is not None:
            for tell in reversed(self._on_failure):
                tell(self.failure)
        while True:
            try:
                posted = self._inbox.get_nowait()
            except queue.Empty:
                break
            if posted is not None and posted[1] is not None:
                posted[1](self._over)
