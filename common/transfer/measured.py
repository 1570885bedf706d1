"""A receiver that counts: seconds of READs and digests, bytes moved, and how READs fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from common.errors import ServingError, TransferError
from common.observe.metrics import Tally
from common.ops.digest import Signature
from common.transfer.gate import Gate
from common.transfer.link import Link, Source
from common.transfer.receiver import Receiver


class MeasuredReceiver(Receiver):
    """The same promises, told to a tally."""

    def __init__(
        self, link: Link, tally: Tally, *, quarantine_bound: int, verifying: bool = True
    ) -> None:
        """`tally` is the room's."""
        super().__init__(link, quarantine_bound=quarantine_bound, verifying=verifying)
        self._tally = tally

    def fetch_all(
        self,
        pieces: Sequence[Sequence[Source]],
        deadline_s: float,
        cancelled: Callable[[], bool],
        on_free: Callable[[], None],
        landed: Callable[[int], None] | None = None,
        posted: Callable[[], None] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """As `Receiver.fetch_all`; a READ that did not complete counts as an error, by its code.

        One that its owner kept back is timed from when all of it could be READ.
        """
        started = time.perf_counter()
        try:
            super().fetch_all(pieces, deadline_s, cancelled, on_free, landed, posted, gate)
        except ServingError as error:
            self._tally.add("baton_transfer_errors_total", code=error.code)
            if isinstance(error, TransferError) and error.library:
                self._tally.add("baton_nixl_errors_total", kind=error.library)
            raise
        began = started if gate is None else gate.opened_at
        self._tally.observe("baton_pull_seconds", time.perf_counter() - began)
        moved = sum(local.size for piece in pieces for _, pairs in piece for local, _ in pairs)
        self._tally.add("baton_pulled_bytes_total", float(moved))

    def verify(self, signed: Mapping[str, int], measure: Callable[[], Signature]) -> None:
        """As `Receiver.verify`; timed whether it passes or not."""
        started = time.perf_counter()
        try:
            super().verify(signed, measure)
        finally:
            self._tally.observe("baton_verify_seconds", time.perf_counter() - started)
