"""What one journey cost: the moments it passed, told to the counters when it ends.

Knows times and counts of a request, never its words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping

from common.config.settings import ObjectiveSettings
from common.contract.messages import Accepted, EmbedTicket, Seal
from common.errors import ServingError
from common.observe.logs import client_id, note, request_id
from common.observe.metrics import Tally
from router.jobs import Task
from router.recent import GOOD, STAGES, Part, Past, Recent, Stumble
from router.replica import Replica

_log = logging.getLogger("baton.requests")


class Account:
    """Moments of one request on the event loop's clock, in seconds."""

    def __init__(
        self, task: Task, tally: Tally, recent: Recent, objective: ObjectiveSettings
    ) -> None:
        """Starts the clock. Probes are left out of the counters of requests."""
        self._task, self._tally, self._recent = task, tally, recent
        self._objective = objective
        self._began, self._began_unix = self._now(), time.time()
        self._header, self._client = request_id.get(), client_id.get()
        self._first: float | None = None
        self._tokens = 0
        self.cached_tokens = 0  # of the prompt, spared by prefill's cache
        self.admission_s = 0.0
        self._parts: list[Part] = []
        self._part_began = self._began
        self._stumbles: list[Stumble] = []
        self._stages: dict[str, float] = {}  # what rooms said of waiting, computing, pulling

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def part(self, name: str, route: Mapping[str, Replica]) -> Iterator[None]:
        """A stretch of the way, whether it is passed or ends in an error.

        `route` has the replica last asked, by room, when the part is over.
        """
        began = self._part_began = self._now()
        error = ""
        try:
            yield
        except ServingError as ended:
            error = ended.code
            raise
        finally:
            room = "decode" if name == "wait" else STAGES[name]
            self._parts.append(
                Part(
                    name=name,
                    at_s=began - self._began,
                    long_s=self._now() - began,
                    replica=route[room].id if room in route else "",
                    error=error,
                )
            )

    def stumbled(self, name: str, at: Replica | None, why: ServingError) -> None:
        """A pass ended early and another one begins."""
        self._stumbles.append(
            Stumble(
                name=name,
                at_s=self._now() - self._began,
                room=at.room if at else "",
                replica=at.id if at else "",
                why=why.code,
            )
        )

    def admitted(self) -> None:
        """A reservation was granted; after a stumble, another one."""
        self.admission_s = self.admission_s or self._now() - self._began

    def emitted(self, tokens: int) -> None:
        """Tokens went towards the client."""
        self._tokens += tokens
        if self._first is None and tokens:
            self._first = self._now()

    def encoded(self, ticket: EmbedTicket, replica: str) -> None:
        """The encoder tells how long the images took."""
        told = {"prepare": ticket.prepare_s, "encode_wait": ticket.wait_s}
        self._told("encode", replica, **told, tower=ticket.compute_s)

    def prefilled(self, seal: Seal, replica: str) -> None:
        """Prefill tells its own times; what its cache spared counts the first time only."""
        if "prefill_s" not in self._stages:
            self.cached_tokens = seal.cached_tokens
        self._told("prefill", replica, prefill_wait=seal.wait_s, compute=seal.compute_s)
        self._stages |= {"prefill_wait_s": seal.wait_s, "prefill_s": seal.compute_s}

    def accepted(self, reply: Accepted, replica: str) -> None:
        """Decode tells how long the hand-off took."""
        told = {"decode_wait": reply.wait_s, "pull": reply.pull_s, "verify": reply.verify_s}
        self._told("hand_off", replica, **told)
        self._stages |= {f"{name}_s": seconds for name, seconds in told.items()}

    def close(self, outcome: str) -> None:
        """The end: `outcome` is a finish reason or the code of an error."""
        if self._task.probe:
            return
        end = self._now()
        total_s, prompt = end - self._began, len(self._task.token_ids)
        first_s = None if self._first is None else self._first - self._began
        pace_s = None
        if self._first is not None and self._tokens > 1:
            pace_s = (end - self._first) / (self._tokens - 1)
        self._count(outcome, total_s, first_s, pace_s)
        times = self._stages if first_s is None else {"first_token_s": first_s} | self._stages
        note(
            _log,
            logging.INFO,
            "request ended",
            outcome=outcome,
            prompt_tokens=prompt,
            completion_tokens=self._tokens,
            total_s=round(total_s, 5),
            admission_s=round(self.admission_s, 5),
            **{key: round(value, 5) for key, value in times.items()},
        )
        self._recent.add(
            Past(
                request=self._task.request,
                header=self._header,
                client=self._client,
                trace=self._task.trace,
                outcome=outcome,
                began=self._began_unix,
                total_s=total_s,
                first_token_s=first_s,
                prompt_tokens=prompt,
                completion_tokens=self._tokens,
                parts=tuple(sorted(self._parts, key=lambda part: (part.at_s, part.within))),
                stumbles=tuple(self._stumbles),
            )
        )

    def _count(
        self, outcome: str, total_s: float, first_s: float | None, pace_s: float | None
    ) -> None:
        tally = self._tally
        tally.add("baton_requests_total", outcome=outcome)
        tally.add("baton_prompt_tokens_total", len(self._task.token_ids))
        tally.add("baton_prefix_tokens_total", self.cached_tokens)
        tally.add("baton_completion_tokens_total", self._tokens)
        tally.observe("baton_request_seconds", total_s)
        tally.observe("baton_admission_wait_seconds", self.admission_s)
        if first_s is not None:
            tally.observe("baton_first_token_seconds", first_s)
            for name, seconds in self._first_token_parts():
                tally.observe("baton_first_token_part_seconds", seconds, part=name)
        if pace_s is not None:
            tally.observe("baton_next_token_seconds", pace_s)
        good = outcome in GOOD and first_s is not None and first_s <= self._objective.first_token_s
        tally.add(
            "baton_good_requests_total",
            float(good and (pace_s is None or pace_s <= self._objective.next_token_s)),
        )

    def _first_token_parts(self) -> list[tuple[str, float]]:
        encode = [part.long_s for part in self._parts if part.name == "encode"]
        return [
            ("admission", self.admission_s),
            *([("encode", sum(encode))] if encode else []),
            ("prefill_wait", self._stages.get("prefill_wait_s", 0.0)),
            ("prefill", self._stages.get("prefill_s", 0.0)),
        ]

    def _told(self, within: str, replica: str, **seconds: float) -> None:
        """Parts that a room told of when it answered: they end now, one after the other."""
        earliest, now = self._part_began - self._began, self._now() - self._began
        at = max(earliest, now - sum(seconds.values()))
        for name, long in seconds.items():
            self._parts.append(
                Part(
                    name=name,
                    at_s=at,
                    long_s=min(long, now - at),
                    replica=replica,
                    within=within,
                )
            )
            at = min(now, at + long)
