"""Probes: every pair of prefill and decode replicas answers a known prompt before it serves.

A probe is a real request through `router/flow.py` with the canary on, in the background. The same
prompt, greedily, must give the same tokens through every pair of one model. What a probe proves
holds for one epoch of both replicas; it is repeated every `probe_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from functools import partial

from common.contract.messages import Sampling
from common.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    HandoffRefused,
    NotReady,
    RoomLost,
    ServingError,
    TransferError,
)
from common.observe.logs import note
from router.house import House
from router.jobs import Task
from router.journey import Journey
from router.placement import Candidate
from router.recovery import is_difference
from router.replica import Replica

PROMPT_TOKENS = 67  # more than a page, and not a whole number of pages or chunks
ANSWER_TOKENS = 4
PROBE_DEADLINE_S = 30.0
AT_ONCE = 4
TICK_S = 0.25

# These tell of load or of a death, not of a wrong computation: no verdict.
UNDECIDED = (CapacityError, RoomLost, DeadlineExceeded, Cancelled, NotReady)

# These tell that nothing could be compared, because the bytes did not come: no verdict, once.
MOVED_NOTHING = (TransferError.code, HandoffRefused.code)

_log = logging.getLogger("baton.readiness")

Pair = tuple[Replica, Replica]


class Readiness:
    """Probes pairs for ever, and says whether the house may serve."""

    def __init__(self, house: House, *, context: int) -> None:
        """`context`: most tokens of prompt and answer, which a probe must not pass."""
        self._house = house
        length = min(PROMPT_TOKENS, max(1, context - ANSWER_TOKENS))
        self.prompt = tuple(range(1, length + 1))
        self.is_draining = False
        self.is_closing = False  # nobody takes its place: who comes now is told so
        self._numbers = itertools.count(1)
        self._probed_at: dict[Pair, float] = {}
        self._running: dict[Pair, asyncio.Task[None]] = {}
        self._known: dict[str, tuple[int, ...]] = {}  # by model print

    @property
    def is_ready(self) -> bool:
        """Whether to send requests here: a pair has passed its probe, and this router stays."""
        return not self.is_draining and self._has_pair

    async def wait(self, within_s: float) -> bool:
        """Until ready, at most so long; returns whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.is_ready:
                    await self._house.bell.wait(TICK_S)
        return self.is_ready

    def demand(self) -> None:
        """Let a request pass while rooms can serve it, those that reach a leaving router too.

        Raises:
            NotReady: no pair of rooms is fit for it.
        """
        if not self._has_pair:
            raise NotReady("no prefill and decode replica have passed a probe with each other")

    @property
    def _has_pair(self) -> bool:
        return self._house.pairs_ready() > 0

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                self._begin_due()
                await self._house.bell.wait(TICK_S)
        finally:
            for task in self._running.values():
                task.cancel()

    def _begin_due(self) -> None:
        board, now = self._house.board, asyncio.get_running_loop().time()
        pairs = list(itertools.product(board.present("prefill"), board.present("decode")))
        self._probed_at = {p: at for p, at in self._probed_at.items() if p in set(pairs)}
        self._house.pairs.forget_older([r.candidate() for r in board.connected()])
        due = [p for p in pairs if p not in self._running and self._due_at(p) <= now]
        for pair in sorted(due, key=self._due_at)[: AT_ONCE - len(self._running)]:
            self._probed_at[pair] = now
            task = asyncio.create_task(self._probe(pair))
            self._running[pair] = task
            task.add_done_callback(partial(self._ended, pair))

    def _ended(self, pair: Pair, _: asyncio.Task[None]) -> None:
        self._running.pop(pair, None)

    def _due_at(self, pair: Pair) -> float:
        if pair not in self._probed_at:
            return 0.0
        # A pair that may not serve is tried sooner than one that is known to be good.
        usable = self._house.pairs.usable(*_candidates(pair))
        period = (
            self._house.settings.router.probe_s
            if usable
            else min(1.0, self._house.settings.router.probe_s)
        )
        return self._probed_at[pair] + period

    async def _probe(self, pair: Pair) -> None:
        prefill, decode = _candidates(pair)
        outcome = "passed"
        try:
            tokens = await self._ask(pair)
            known = self._known.setdefault(pair[0].endpoint.model_print, tokens)
            if tokens != known:
                outcome = "differs"
        except UNDECIDED as error:
            outcome = error.code
        except ServingError as error:
            late = isinstance(error, TransferError) and not is_difference(error)
            outcome = error.code if late else "failed"
            note(_log, logging.WARNING, "probe failed", pair=_name(pair), reason=str(error))
        self._house.tally.add("baton_probes_total", outcome=outcome)
        self._judge(outcome, prefill, decode, _name(pair))
        self._house.bell.ring()

    def _judge(self, outcome: str, prefill: Candidate, decode: Candidate, name: str) -> None:
        pairs = self._house.pairs
        if outcome == "passed":
            if not pairs.usable(prefill, decode):
                note(_log, logging.INFO, "pair passed a probe", pair=name)
            pairs.passed(prefill, decode)
        elif outcome in ("differs", "failed"):
            pairs.failed(prefill, decode)
        elif outcome in MOVED_NOTHING:
            pairs.stalled(prefill, decode)

    async def _ask(self, pair: Pair) -> tuple[int, ...]:
        sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS)
        task = Task(
            request=f"probe-{self._house.name}-{next(self._numbers)}",
            token_ids=self.prompt,
            sampling=sampling,
            deadline=asyncio.get_running_loop().time() + PROBE_DEADLINE_S,
            canary=True,
            probe=True,
            pair=(pair[0].id, pair[1].id),
        )
        async with Journey(task, self._house) as journey:
            return tuple([token.id async for item in journey.events() for token in item.tokens])


def _candidates(pair: Pair) -> tuple[Candidate, Candidate]:
    return pair[0].candidate(), pair[1].candidate()


def _name(pair: Pair) -> str:
    return f"{pair[0].id} {pair[1].id}"
