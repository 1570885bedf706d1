"""The prefill loop: admit, fetch embeddings, compute chunks, sample the first token, offer.

One thread owns the pools (`EngineLoop`); everything public may be called from any thread. A
request's slot and pages are taken when it is admitted and given back when its ticket ended, or at
once when it never got that far. What a step computes is decided in `scheduler.py`, what a ticket
says in `publish.py`.

Longer than 300 lines because every change of a prompt's stage stands here, in one thread's hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from common.cache.mla_pool import pages_of
from common.config.settings import PrefillSettings
from common.config.spec import CHUNK
from common.contract.messages import CacheTicket, Message, Offered, PrefillJob
from common.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    HandoffRefused,
    InvalidRequest,
    RoomLost,
    ServingError,
)
from common.grammar.library import Matcher
from common.grammar.shelf import GrammarShelf
from common.model.batch import StepBatch
from common.model.text import TextModel
from common.observe.metrics import Tally
from common.runtime.loop import EngineLoop
from common.runtime.memory import TextMemory
from common.transfer.owner import Owner
from services.prefill.early import Passing, borders_of
from services.prefill.embeds import EmbedPuller
from services.prefill.publish import Finished, Signer, publish
from services.prefill.scheduler import Progress, plan_step
from services.prefill.work import Work, roomiest, share_of

Tell = Callable[[str, Message], None]
Plant = Callable[[list[tuple[Work, int]], TextMemory], None]


class PrefillEngine:
    """Prompts in, tickets out."""

    def __init__(
        self,
        model: TextModel,
        memory: TextMemory,
        puller: EmbedPuller,
        grammars: GrammarShelf,
        owner: Owner,
        settings: PrefillSettings,
        tally: Tally,
        signer: Signer,
        *,
        layer_groups: int = 0,
        tell: Tell = lambda caller, message: None,
    ) -> None:
        """Build the engine; `loop.start()` begins.

        `layer_groups`: of a slot's layers that may be pulled while a last chunk is computed, 0:
        none; `tell(caller, message)` sends a router a message without a reply.
        """
        self._model, self._memory, self._puller = model, memory, puller
        self._grammars, self._signer = grammars, signer
        self._owner, self._settings, self._tally = owner, settings, tally
        self._borders: tuple[int, ...] = ()
        if layer_groups:
            self._borders = borders_of(len(memory.states.layers), layer_groups)
        self._tell = tell
        self.plant: Plant | None = None  # a test's: called with a step's shares before it
        self._works: list[Work] = []  # oldest first; ended ones are removed
        self.loop = EngineLoop("prefill", self._step)
        self.loop.on_failure(self._fail_all)

    # --- from any thread

    def submit(self, job: PrefillJob, caller: str = "") -> Future[CacheTicket]:
        """Queue a prompt of a router; the future has its ticket or its error."""
        work = Work(job=job, caller=caller, deadline=time.monotonic() + job.deadline_s)
        self.loop.post(lambda: self._enqueue(work), work.future.set_exception)
        return work.future

    def cancel(self, request: str) -> None:
        """Forget a request wherever it stands."""
        self._owner.abort(request)
        self.loop.post(lambda: self._cancel(request))

    def caller_lost(self, caller: str) -> None:
        """Compute nothing more for a router that is gone; its tickets end with their leases."""
        self.loop.post(lambda: self._forget_caller(caller))

    def sweep(self) -> None:
        """Expire leases and deadlines; called every half second."""
        self._owner.sweep()
        self.loop.post(self._expire)

    def works(self) -> list[Work]:
        """Live requests, for load and inventory."""
        return list(self._works)

    # --- in the loop's thread

    def _enqueue(self, work: Work) -> None:
        try:
            self._refuse_impossible(work)
        except ServingError as error:
            work.future.set_exception(error)
            return
        self._works.append(work)
        if work.job.sampling.grammar is not None:
            work.stage = "compiling"
            compiled = self._grammars.begin(work.job.sampling.grammar)
            compiled.add_done_callback(partial(self._compiled, work))

    def _compiled(self, work: Work, future: Future[Matcher]) -> None:
        def go_on() -> None:
            if work.stage != "compiling":
                return
            if (error := future.exception()) is not None:
                self._end(work, error)
                return
            work.stage, work.matcher = "queued", future.result()

        self.loop.post(go_on)

    def _refuse_impossible(self, work: Work) -> None:
        job, pages = work.job, self._memory.pages.total  # of every lane
        if not job.token_ids:
            raise InvalidRequest("the prompt is empty")
        if pages_of(work.total) > pages:
            raise InvalidRequest(f"a prompt of {work.total} tokens needs more than {pages} pages")
        rows = sum(part.tokens for part in job.embeds.parts) if job.embeds else 0
        if rows > self._settings.landing_rows:
            raise InvalidRequest(
                f"the images have {rows} tokens, a prefill replica takes "
                f"{self._settings.landing_rows} at once; send fewer or smaller ones, or raise "
                "prefill.landing_rows"
            )
        if (
            sum(w.stage in ("compiling", "queued") for w in self._works)
            >= self._settings.queue_limit
        ):
            raise CapacityError(f"{self._settings.queue_limit} prompts wait here already")

    def _step(self) -> bool:
        self._admit()
        running = [work for work in self._works if work.stage == "running"]
        if not running:
            return False
        progress = [Progress(done=work.done, total=work.limit) for work in running]
        counts = plan_step(
            progress,
            step_tokens=self._settings.step_tokens,
            max_batch=self._settings.max_batch,
        )
        started = time.perf_counter()
        chosen = [(w, n) for w, n in zip(running, counts, strict=True) if n]
        for work, _ in chosen:
            self._prepare_canary(work)
        if self.plant is not None:
            self.plant(chosen, self._memory)
        passing = self._offer_early(chosen)
        logits = self._forward(chosen) if passing is None else self._pass(chosen, passing)
        self._tally.observe("baton_prefill_step_seconds", time.perf_counter() - started)
        self._tally.observe("baton_prefill_step_tokens", float(sum(n for _, n in chosen)))
        row = 0
        for work, count in chosen:
            self._absorb(work, count)
            if work.done == work.total:
                self._publish(work, logits[row])
                row += 1
        return True

    def _admit(self) -> None:
        for work in self._works:
            if work.stage != "queued":
                continue
            slots, pages = 1 + work.job.canary, pages_of(work.total)
            memory = roomiest(self._memory.lanes, slots, pages)
            if memory is None:
                return
            if work.job.image_offsets:
                try:
                    work.pull = self._puller.start(work.job)
                except CapacityError:
                    return
                except ServingError as error:
                    self._end(work, error)
                    return
                work.pull.future.add_done_callback(partial(self._pulled, work))
            work.lane, taken = memory, memory.slots.take(slots)
            work.slot, work.canary_slot = taken[0], taken[1] if work.job.canary else -1
            work.pages = memory.pages.take(pages)
            memory.begin(work.slot, work.nonce)
            work.stage = "fetching" if work.pull is not None else "running"
            work.started = time.monotonic()

    def _pulled(self, work: Work, future: Future[None]) -> None:
        def go_on() -> None:
            error = future.exception()
            if error is not None and not isinstance(error, ServingError):
                raise error  # whether its READ ended is not known: this room ends
            if work.stage != "fetching":
                return
            if error is None:
                work.stage = "running"
            else:
                if isinstance(error, HandoffRefused):
                    self._tally.add("baton_handoffs_refused_total", part=error.family)
                self._end(work, error)

        self.loop.post(go_on)

    def _offer_early(self, chosen: list[tuple[Work, int]]) -> Passing | None:
        """Offer the prompts that this step will finish, so that they are pulled meanwhile."""
        ending = [
            work
            for work, count in chosen
            if work.done + count == work.total and work.job.sampling.max_tokens > 1
        ]
        if not self._borders or not ending:
            return None
        states = self._memory.states
        passing = Passing(layers=states.layers, borders=self._borders, device=states.state.device)
        passing.begin()
        for work in ending:
            work.offer = passing.offer(work, self._owner, partial(self._ticket_ended, work))
            self._tell(work.caller, Offered(request=work.job.request, offer=work.offer))
        return passing

    def _forward(self, chosen: list[tuple[Work, int]]) -> Tensor:
        return self._model.forward(_batch_of(chosen), self._memory.tensors)

    def _pass(self, chosen: list[tuple[Work, int]], passing: Passing) -> Tensor:
        """The same while it is noted which layers are final."""
        batch, tensors = _batch_of(chosen), self._memory.tensors
        logits, _ = self._model.capture(
            batch, tensors, layers=(), convention="prefix", after=passing.after
        )
        for work, _ in chosen:
            if work.offer is not None:  # the last thing that is written there
                work.memory.latents.zero_rest(work.pages, work.total)
        passing.end()
        return logits

    def _prepare_canary(self, work: Work) -> None:
        """Before the last share: leave the state before the last token in the canary's slot."""
        if work.canary_slot < 0 or work.limit != work.total:
            return
        work.memory.copy_slot(work.slot, work.canary_slot)
        count = work.total - 1 - work.done
        if count:
            share = share_of(work, work.canary_slot, count, want_logits=False)
            batch = StepBatch(kind="chunks", shares=(share,))
            self._model.forward(batch, self._memory.tensors)
            work.memory.states.advance(work.canary_slot, work.nonce, count)

    def _absorb(self, work: Work, count: int) -> None:
        work.memory.states.advance(work.slot, work.nonce, count)
        first, last = work.done // CHUNK, (work.done + count) // CHUNK
        work.memory.sign_pages(first, *work.pages[first:last])
        work.done += count
        self._tally.add("baton_prefill_tokens_total", float(count))

    def _publish(self, work: Work, logits: Tensor) -> None:
        finished = Finished(
            job=work.job,
            memory=work.memory,
            nonce=work.nonce,
            slot=work.slot,
            canary_slot=work.canary_slot,
            pages=work.pages,
            matcher=work.matcher,
            offer=work.offer,
            wait_s=work.started - work.arrived,
            compute_s=time.monotonic() - work.started,
        )
        on_end: Callable[[str], None] = partial(self._ticket_ended, work)
        try:
            ticket = publish(finished, logits, self._signer, self._owner, on_end)
        except ServingError as error:
            if error.code == "non_finite":
                self._tally.add("baton_poisoned_total")
            self._end(work, error)
            return
        work.stage = "published"
        if work.pull is not None:
            work.pull.let_go("request")
        self._tally.observe("baton_prefill_wait_seconds", finished.wait_s)
        self._tally.observe("baton_prefill_seconds", finished.compute_s)
        work.future.set_result(ticket)

    def _ticket_ended(self, work: Work, outcome: str) -> None:
        self._tally.add("baton_tickets_total", outcome=outcome)
        self.loop.post(lambda: self._let_go(work, outcome))

    def _let_go(self, work: Work, outcome: str) -> None:
        if work.stage == "published":
            self._free(work)
        else:  # it was offered early, and the prompt need not be computed to its end
            self._end(work, HandoffRefused("lease", f"its ticket was {outcome} before its seal"))

    def _cancel(self, request: str) -> None:
        self._owner.abort(request)  # a ticket given out since the message came
        for work in [w for w in self._works if w.job.request == request]:
            if work.stage != "published":
                self._end(work, Cancelled(f"request {request} was cancelled"))

    def _forget_caller(self, caller: str) -> None:
        for work in [w for w in self._works if w.caller == caller and w.stage != "published"]:
            self._end(work, Cancelled(f"{caller} is gone"))

    def _expire(self) -> None:
        now = time.monotonic()
        for work in [w for w in self._works if w.stage != "published" and now > w.deadline]:
            self._end(work, DeadlineExceeded("the prompt was not computed in time"))

    def _end(self, work: Work, error: BaseException) -> None:
        if work in self._works:
            self._free(work)
            work.future.set_exception(error)
            if work.offer is not None:
                self._owner.release(work.offer.nonce, "aborted")

    def _free(self, work: Work) -> None:
        if work not in self._works:
            return
        self._works.remove(work)
        work.stage = "ended"
        if work.pull is not None:
            work.pull.let_go("request")
        if work.slot >= 0:
            work.memory.slots.give(s for s in (work.slot, work.canary_slot) if s >= 0)
            work.memory.pages.give(work.pages)

    def _fail_all(self, error: BaseException) -> None:
        for work in list(self._works):
            if not work.future.done():
                work.future.set_exception(RoomLost(f"the prefill engine stopped: {error}"))


def _batch_of(chosen: list[tuple[Work, int]]) -> StepBatch:
    shares = tuple(
        share_of(work, work.slot, count, want_logits=work.done + count == work.total)
        for work, count in chosen
    )
    return StepBatch(kind="chunks", shares=shares)
