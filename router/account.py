"""What one journey cost: the moments it passed, told to the counters when it ends.

Knows times and counts of a request, never its words.
"""

from __future__ import annotations

import asyncio
import logging

from common.contract.messages import Accepted, Seal
from common.observe.logs import note
from common.observe.metrics import Tally

_log = logging.getLogger("baton.requests")


class Account:
    """Moments of one request on the event loop's clock, in seconds."""

    def __init__(self, tally: Tally, *, is_probe: bool) -> None:
        """Starts the clock. Probes are left out of the counters of requests."""
        self._tally, self._is_probe = tally, is_probe
        self._began = self._now()
        self._first: float | None = None
        self._tokens = 0
        self.cached_tokens = 0  # of the prompt, spared by prefill's cache
        self.admission_s = 0.0
        self._stages: dict[str, float] = {}  # what rooms said of waiting, computing, pulling

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def admitted(self) -> None:
        """A reservation was granted; after a stumble, another one."""
        self.admission_s = self.admission_s or self._now() - self._began

    def emitted(self, tokens: int) -> None:
        """Tokens went towards the client."""
        self._tokens += tokens
        if self._first is None and tokens:
            self._first = self._now()

    def prefilled(self, seal: Seal) -> None:
        """Prefill tells its own times; what its cache spared counts the first time only."""
        if "prefill_s" not in self._stages:
            self.cached_tokens = seal.cached_tokens
        self._stages |= {"prefill_wait_s": seal.wait_s, "prefill_s": seal.compute_s}

    def accepted(self, reply: Accepted) -> None:
        """Decode tells how long the hand-off took."""
        self._stages |= {
            "decode_wait_s": reply.wait_s,
            "pull_s": reply.pull_s,
            "verify_s": reply.verify_s,
        }

    def close(self, outcome: str, *, prompt_tokens: int) -> None:
        """The end: `outcome` is a finish reason or the code of an error."""
        if self._is_probe:
            return
        tally, end = self._tally, self._now()
        tally.add("baton_requests_total", outcome=outcome)
        tally.add("baton_prompt_tokens_total", prompt_tokens)
        tally.add("baton_completion_tokens_total", self._tokens)
        tally.observe("baton_request_seconds", end - self._began)
        tally.observe("baton_admission_wait_seconds", self.admission_s)
        fields = {"admission_s": round(self.admission_s, 5)}
        if self._first is not None:
            fields["first_token_s"] = round(self._first - self._began, 5)
            tally.observe("baton_first_token_seconds", self._first - self._began)
            if self._tokens > 1:
                pace = (end - self._first) / (self._tokens - 1)
                tally.observe("baton_next_token_seconds", pace)
        note(
            _log,
            logging.INFO,
            "request ended",
            outcome=outcome,
            prompt_tokens=prompt_tokens,
            completion_tokens=self._tokens,
            total_s=round(end - self._began, 5),
            **fields,
            **{key: round(value, 5) for key, value in self._stages.items()},
        )
