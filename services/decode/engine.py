"""The decode loop: reserve, take in, step, emit frames.

One thread owns pools and batch (`EngineLoop`); hand-offs are taken in by transfer threads
(`intake.py`) and join between two steps. Memory is given back when its request ended and no READ
may write there any more (architecture, D1). Tokens leave in one frame a step and router.
Longer than 300 lines because every change of a request's stage stands here, in one thread's hands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from common.config.settings import DecodeSettings
from common.contract.finish import finish_of
from common.contract.messages import (
    Accepted,
    DecodeJob,
    Done,
    PullJob,
    Reservation,
    Reserve,
    TokenOut,
)
from common.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoffRefused,
    PoisonedState,
    RoomLost,
    ServingError,
)
from common.model.batch import StepBatch
from common.observe.logs import request_id
from common.observe.metrics import Tally
from common.runtime.choosing import Stepper
from common.runtime.loop import EngineLoop, promise
from common.runtime.memory import TextMemory
from common.sampling.masks import Masks
from services.decode.frames import Frames, Push
from services.decode.held import (
    Choice,
    Held,
    give_back,
    position_of,
    reserve_in_a_lane,
    row_of,
    share_of,
)
from services.decode.intake import Intake, Times
from services.decode.joining import canary_difference, join
from services.decode.pulls import NOT_OURS, Pulls, Release
from services.decode.scheduler import plan_step

log = logging.getLogger("baton.decode")
Plant = Callable[[list[tuple[Held, Choice]], TextMemory], None]


class DecodeEngine:
    """Tickets in, frames out."""

    def __init__(
        self,
        model: Stepper,
        memory: TextMemory,
        intake: Intake,
        threads: Executor,
        settings: DecodeSettings,
        tally: Tally,
        *,
        pull_threads: Executor,
        epoch: int,
        lease_s: float,
        canary_bound: float,
        push: Push,
        release: Release,
        masks: Masks,
    ) -> None:
        """Build the engine; `loop.start()` begins."""
        self._model, self._memory, self._intake = model, memory, intake
        self._threads, self._settings, self._tally = threads, settings, tally
        self._epoch, self._lease_s, self._canary_bound = epoch, lease_s, canary_bound
        self._release, self._masks = release, masks
        self._helds: dict[bytes, Held] = {}
        self._running: list[tuple[Held, Choice]] = []
        self._frames = Frames(push)
        self._steps = 0
        self.plant: Plant | None = None  # a test's: called with a step's shares before it
        self.loop = EngineLoop("decode", self._step)
        self.loop.on_failure(self._fail_all)
        self.pulls = Pulls(
            intake,
            self.loop,
            tally,
            release,
            pull_threads,
            writer_ended=self._writer_ended,
            spent=self._end,
        )

    # --- from any thread

    def reserve(self, message: Reserve, caller: str) -> Future[Reservation]:
        """Hold slots and pages for a request until its job comes or its lease ends."""
        return self.loop.ask(lambda: self._reserve(message, caller))

    def pull(self, job: PullJob) -> Future[Done]:
        """READ an offer into its reservation; the future is done when everything is here."""
        told: Future[Done] = promise()
        self.loop.post(
            lambda: self.pulls.begin(self._helds.get(job.reservation), job, told),
            told.set_exception,
        )
        return told

    def submit(self, job: DecodeJob) -> Future[Accepted]:
        """Take in a hand-off for a reservation; frames follow when the future has its result."""
        accepted: Future[Accepted] = promise()
        posted = time.monotonic()
        self.loop.post(lambda: self._begin_intake(job, posted, accepted), accepted.set_exception)
        return accepted

    def renew(self, ids: tuple[bytes, ...]) -> None:
        """Keep reservations that are still waiting for their job."""
        self.loop.post(lambda: self._renew(ids))

    def release(self, reservation: bytes) -> None:
        """Give a reservation back."""
        self.loop.post(lambda: self._end_all(lambda held: held.id == reservation, "released"))

    def cancel(self, request: str) -> None:
        """Forget a request wherever it stands."""
        self.loop.post(
            lambda: self._end_all(lambda held: held.reserve.request == request, "cancelled")
        )

    def pace(self, request: str, paused: bool) -> None:
        """Step a request no further, or go on with it."""
        self.loop.post(lambda: self._pace(request, paused))

    def caller_lost(self, caller: str) -> None:
        """Forget everything of a router that is gone: nobody reads its frames."""
        self.loop.post(lambda: self._end_all(lambda held: held.caller == caller, "cancelled"))

    def sweep(self) -> None:
        """Expire reservations and deadlines; called every half second."""
        self.loop.post(self._expire)

    def helds(self) -> list[Held]:
        """What is held now, for load and inventory."""
        return list(self._helds.values())

    # --- in the loop's thread: reservations and hand-offs

    def _reserve(self, message: Reserve, caller: str) -> Reservation:
        try:
            held = reserve_in_a_lane(message, caller, self._memory.lanes, self._lease_s)
        except ServingError:
            self._tally.add("baton_reservations_refused_total")
            raise
        self._helds[held.id] = held
        return Reservation(id=held.id, epoch=self._epoch, lease_s=self._lease_s)

    def _begin_intake(self, job: DecodeJob, posted: float, accepted: Future[Accepted]) -> None:
        held, nonce = self._helds.get(job.reservation), job.ticket.offer.nonce
        if held is None or held.stage != "reserved" or not self.pulls.fits(held, nonce):
            if held is None or held.job is None or held.job.ticket.offer.nonce != nonce:
                self._release(job.producer, nonce, "aborted")
            accepted.set_exception(
                HandoffRefused("reservation", "it is not held any more; reserve again")
            )
            return
        held.stage, held.job, held.accepted = "fetching", job, accepted
        held.writers += 1 + (self._intake.readers if held.pull is None else 0)
        held.deadline = posted + job.deadline_s
        self._threads.submit(self._run_intake, held, job, posted)

    def _run_intake(self, held: Held, job: DecodeJob, posted: float) -> None:
        writer_ended = partial(self.loop.post, partial(self._writer_ended, held))
        read_ended: list[bool] = []

        def end_read() -> None:
            read_ended.append(True)
            writer_ended()

        try:
            times = self._intake.take(held, job, posted, end_read)
        except ServingError as error:
            writer_ended()
            self.loop.post(partial(self._refuse, held, job, error))
        except Exception as fault:  # nobody waits for this thread: the engine must hear of it
            request_id.set(job.request.partition("~")[0])
            log.exception("taking in a hand-off failed")
            if held.pull is None and len(read_ended) < self._intake.readers:
                self.loop.post(partial(self._stop_for, fault))
                return
            writer_ended()
            told = ServingError("the room met a fault of its own; its log has more")
            self.loop.post(partial(self._refuse, held, job, told))
        else:
            writer_ended()
            self.loop.post(partial(self._join, held, job, times))

    def _stop_for(self, fault: BaseException) -> None:
        """A fault in a transfer thread: whether its READ ended is not known, so this room ends."""
        raise fault

    def _writer_ended(self, held: Held) -> None:
        held.writers -= 1
        if held.stage == "ended" and not held.writers:
            give_back(held)

    def _refuse(self, held: Held, job: DecodeJob, error: ServingError) -> None:
        refused = isinstance(error, HandoffRefused)
        if isinstance(error, HandoffRefused):
            self._tally.add("baton_handoffs_refused_total", part=error.family)
        if not (isinstance(error, HandoffRefused) and error.part in NOT_OURS):
            self._release(job.producer, job.ticket.offer.nonce, "refused" if refused else "aborted")
        if held.stage != "ended":
            if held.writers:  # the destination stays in quarantine, so the reservation is spent
                self._end(held)
            else:
                held.stage, held.pull = "reserved", None
                held.expires = time.monotonic() + self._lease_s
        held.accepted.set_exception(error)

    def _join(self, held: Held, job: DecodeJob, times: Times) -> None:
        if held.stage == "ended":
            self._release(job.producer, job.ticket.offer.nonce, "aborted")
            held.accepted.set_exception(Cancelled(f"request {job.request} was cancelled"))
            return
        if held.canary_slot >= 0:
            difference = canary_difference(held, job, self._model, held.memory)
            if not difference <= self._canary_bound:
                text = f"logits differ by {difference:.3g}, the bound is {self._canary_bound:g}"
                self._refuse(held, job, HandoffRefused("canary", text))
                return
        held.choices = join(held, job, held.memory)
        self._release(job.producer, job.ticket.offer.nonce, "released")
        held.stage = "running"
        running = [choice for choice in held.choices if not choice.finish]
        self._running += [(held, choice) for choice in running]
        if not running:
            self._end(held)
        times.tell(self._tally)
        held.accepted.set_result(
            Accepted(wait_s=times.wait_s, pull_s=times.pull_s, verify_s=times.verify_s)
        )

    # --- in the loop's thread: steps

    def _step(self) -> bool:
        running = [(held, choice) for held, choice in self._running if not held.is_paused]
        if not running:
            return False
        started = time.perf_counter()
        by_choice = {id(choice): held for held, choice in running}
        chosen = plan_step([c for _, c in running], max_batch=self._settings.max_batch)
        batch = [(by_choice[id(choice)], choice) for choice in chosen]
        self._steps += 1
        if self.plant is not None:
            self.plant(batch, self._memory)
        sampled = [(held, c) for held, c in batch if c.fed + 1 == len(c.tokens)]
        masks = self._masks.begin([position_of(held, c) for held, c in sampled])  # beside the pass
        logits = self._model.step(
            StepBatch(kind="steps", shares=tuple(share_of(held, c) for held, c in batch)),
            self._memory.tensors,
        )
        for held, choice in batch:
            held.memory.states.advance(choice.slot, held.id, 1)
            choice.fed += 1
            choice.last_step = self._steps
        rows = [row_of(*pair, mask) for pair, mask in zip(sampled, masks.result(), strict=True)]
        # This waits for the step, or a slot could be freed under it.
        tokens = self._model.sample(logits, rows, [held.memory.lane for held, _ in sampled])
        for (held, choice), token in zip(sampled, tokens, strict=True):
            self._emit(held, choice, token)
        self._frames.flush(self._steps)
        self._tally.add("baton_decode_steps_total")
        self._tally.add("baton_decode_tokens_total", float(len(sampled)))
        self._tally.observe("baton_decode_step_seconds", time.perf_counter() - started)
        self._tally.observe("baton_decode_batch", float(len(batch)))
        return True

    def _emit(self, held: Held, choice: Choice, token: TokenOut | ServingError) -> None:
        assert held.job is not None
        if isinstance(token, ServingError):
            if isinstance(token, PoisonedState):
                self._tally.add("baton_poisoned_total")
            self._finish(held, choice, "error", token)
            return
        choice.tokens.append(token.id)
        choice.history.take(token.id)
        if choice.matcher is not None:
            choice.matcher.take(token.id)
        finish = finish_of(held.job.sampling, token.id, len(choice.tokens))
        if finish:
            self._finish(held, choice, finish, None, (token,))
        else:
            self._frames.add(held, choice, (token,))

    def _finish(
        self,
        held: Held,
        choice: Choice,
        finish: str,
        error: ServingError | None,
        tokens: tuple[TokenOut, ...] = (),
    ) -> None:
        choice.finish = finish
        self._frames.add(held, choice, tokens, finish, error)
        self._running.remove((held, choice))
        if all(other.finish for other in held.choices):
            self._end(held)

    # --- in the loop's thread: endings

    def _end(self, held: Held) -> None:
        """Forget a request; memory a READ may still write into is given back later."""
        if self._helds.pop(held.id, None) is None:
            return
        if held.stage == "reserved":
            self.pulls.end(held)
        held.stage = "ended"
        if not held.writers:
            give_back(held)

    def _end_all(self, wanted: Callable[[Held], bool], why: str) -> None:
        for held in [held for held in self._helds.values() if wanted(held)]:
            if why == "cancelled":
                self._tally.add("baton_cancelled_total")
            self._running = [pair for pair in self._running if pair[0] is not held]
            self._end(held)

    def _pace(self, request: str, paused: bool) -> None:
        for held in self._helds.values():
            if held.reserve.request == request:
                held.is_paused = paused

    def _renew(self, ids: tuple[bytes, ...]) -> None:
        for reservation in ids:
            if (held := self._helds.get(reservation)) is not None:
                held.expires = time.monotonic() + self._lease_s

    def _expire(self) -> None:
        now = time.monotonic()
        for held in list(self._helds.values()):
            if held.stage == "reserved" and now > held.expires:
                self._end(held)
            elif held.stage == "running" and now > held.deadline:
                late = DeadlineExceeded("the answer was not finished in time")
                for choice in [c for c in held.choices if not c.finish]:
                    self._finish(held, choice, "error", late)
        self._frames.flush(self._steps)

    def _fail_all(self, error: BaseException) -> None:
        """The room hangs up after this; running requests are continued elsewhere."""
        for held in list(self._helds.values()):
            if held.stage == "fetching" and not held.accepted.done():
                held.accepted.set_exception(RoomLost(f"the decode engine stopped: {error}"))
