"""Pulls: offers that are READ into their reservations while prefill still computes the last chunk.

A pull has a thread of its own, since it waits for another room: what takes in whole hand-offs must
not wait behind it. It takes nothing from its reservation, which keeps its lease; whatever ends that
ends the pull. `begin`, `make_way` and `end` run in the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from common.contract.messages import Done, Endpoint, PullJob
from common.errors import CapacityError, HandoffRefused, ServingError
from common.observe.logs import request_id
from common.observe.metrics import Tally
from common.runtime.loop import EngineLoop
from services.decode.held import Held, Pull
from services.decode.intake import Intake

log = logging.getLogger("baton.decode")
Release = Callable[[Endpoint, bytes, str], None]
NOT_OURS = ("nonce", "epoch")  # refusals after which the ticket may still be in another job's READ


class Pulls:
    """The pulls of one decode room."""

    def __init__(
        self,
        intake: Intake,
        loop: EngineLoop,
        tally: Tally,
        release: Release,
        threads: Executor,
        *,
        writer_ended: Callable[[Held], None],
        spent: Callable[[Held], None],
    ) -> None:
        """Nothing is pulled yet.

        Args:
            intake: READs.
            loop: the engine's.
            tally: the room's.
            release: tells an owner how its ticket ended.
            threads: one for each pull that runs, or it waits.
            writer_ended: somebody who might write into the request's memory no longer does.
            spent: the reservation's memory is in quarantine.
        """
        self._intake, self._loop, self._tally, self._release = intake, loop, tally, release
        self._writer_ended, self._spent = writer_ended, spent
        self._threads = threads

    def begin(self, held: Held | None, job: PullJob, told: Future[Done]) -> None:
        """READ an offer into a reservation, or turn it away: then it is handed off whole."""
        if held is None or held.stage != "reserved":
            told.set_exception(_gone("it is not held any more; reserve again"))
            return
        reason = ""
        if not self._intake.is_alone or len(job.offer.ranks) != 1 or not job.offer.borders:
            reason = "only what one rank hands to one rank is pulled before its seal"
        elif held.pull is not None and held.pull.job.offer.nonce == job.offer.nonce:
            reason = "it is pulled already"
        elif not self.make_way(held):
            reason = "another offer is being pulled into its reservation"
        if reason:
            told.set_exception(CapacityError(reason))
            return
        held.pull = Pull(job=job, told=told)
        held.writers = 2  # the READ and its thread
        self._threads.submit(self._run, held, held.pull)

    def fits(self, held: Held, nonce: bytes) -> bool:
        """Whether this ticket is the one that is pulled, or may be READ anew."""
        if held.pull is not None and held.pull.job.offer.nonce == nonce:
            return True
        return self.make_way(held)

    def make_way(self, held: Held) -> bool:
        """Another ticket comes for this reservation: True when no pull may still write there."""
        if held.pull is not None and held.pull.arrived.done() and not held.writers:
            self.end(held)
        if held.pull is not None:
            held.pull.is_given_up = True
        return held.pull is None

    def end(self, held: Held) -> None:
        """The reservation ends, or is another ticket's: what is pulled into it is not wanted."""
        pull, held.pull = held.pull, None
        if pull is None:
            return
        pull.is_given_up = True
        if pull.arrived.done() and pull.arrived.exception() is None:  # else its thread tells
            self._release(pull.job.producer, pull.job.offer.nonce, "aborted")

    def _run(self, held: Held, pull: Pull) -> None:
        writer_ended = partial(self._loop.post, partial(self._writer_ended, held))
        read_ended: list[bool] = []

        def end_read() -> None:
            read_ended.append(True)
            writer_ended()

        try:
            measure = self._intake.pull(held, pull, end_read)
        except ServingError as error:
            failure = error
        except Exception as fault:  # nobody waits for this thread: the engine must hear of it
            request_id.set(pull.job.request.partition("~")[0])
            log.exception("pulling an offer failed")
            failure = ServingError("the room met a fault of its own; its log has more")
            if not read_ended:
                self._loop.post(partial(_stop_for, fault))
                pull.arrived.set_exception(failure)
                return
        else:
            writer_ended()
            pull.arrived.set_result(measure)
            pull.told.set_result(Done())
            return
        writer_ended()
        pull.arrived.set_exception(failure)
        self._loop.post(partial(self._failed, held, pull, failure))

    def _failed(self, held: Held, pull: Pull, error: ServingError) -> None:
        """Its reservation stands unless a READ is still in progress; its ticket does not."""
        nonce = pull.job.offer.nonce
        over = held.stage == "ended"
        pull.told.set_exception(_gone("it ended while its offer was pulled") if over else error)
        if held.job is not None and held.job.ticket.offer.nonce == nonce:
            return  # the job that joined it is refused, and tells
        refused = isinstance(error, HandoffRefused)
        if isinstance(error, HandoffRefused):
            self._tally.add("baton_handoffs_refused_total", part=error.family)
        if not (isinstance(error, HandoffRefused) and error.part in NOT_OURS):
            self._release(pull.job.producer, nonce, "refused" if refused else "aborted")
        if held.pull is pull and held.stage == "reserved" and held.writers:
            self._spent(held)


def _gone(why: str) -> HandoffRefused:
    return HandoffRefused("reservation", why)


def _stop_for(fault: BaseException) -> None:
    """A fault in a pull's thread: whether its READ ended is not known, so this room ends."""
    raise fault
